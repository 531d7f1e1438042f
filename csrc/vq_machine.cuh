// vq_gemv: what only a GPU can do, in one place, so that the rest runs on a CPU as well
// (tests/support/vq_machine_on_cpu.cuh).
#pragma once

#include <cstdint>

#include "nf4_mma.cuh"  // mma, pack

namespace localq::vq {

__device__ __forceinline__ uint8_t* shared_memory() {
  extern __shared__ __align__(16) uint8_t memory[];
  return memory;
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return uint32_t(__cvta_generic_to_shared(pointer));
}

// The lane, asked anew: what follows from it is made where it is needed, and takes no registers elsewhere.
__device__ __forceinline__ uint32_t fresh_lane() {
  uint32_t lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// kWords words of 4 bytes of shared memory from `address` + kOffset on, or the low half of one. volatile keeps look-ups
// and products in the order in which they are written, which is what fits the registers.
template <int kOffset>
__device__ __forceinline__ void load_half(uint32_t (&to)[1], uint32_t address) {
  uint16_t low;
  asm volatile("ld.shared.u16 %0, [%1+%2];" : "=h"(low) : "r"(address), "n"(kOffset));
  to[0] = low;
}
template <int kOffset>
__device__ __forceinline__ void load_words(uint32_t (&to)[1], uint32_t address) {
  asm volatile("ld.shared.u32 %0, [%1+%2];" : "=r"(to[0]) : "r"(address), "n"(kOffset));
}
template <int kOffset>
__device__ __forceinline__ void load_words(uint32_t (&to)[2], uint32_t address) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2+%3];" : "=r"(to[0]), "=r"(to[1]) : "r"(address), "n"(kOffset));
}
template <int kOffset>
__device__ __forceinline__ void load_words(uint32_t (&to)[4], uint32_t address) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4+%5];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address), "n"(kOffset));
}

// 16 bytes of codes, which are read once: kept out of L1. volatile, as above.
__device__ __forceinline__ uint4 load_codes(const uint8_t* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

// 16 bytes of codewords, which L1 keeps. volatile: loaded where it is written, not kept in registers until then.
__device__ __forceinline__ uint4 load_fragment(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

// 16 bytes to shared memory.
__device__ __forceinline__ void store_words(uint8_t* to, uint4 words) {
  *reinterpret_cast<uint4*>(to) = words;
}

// All threads of the cluster meet: between the two, a thread may do what the others need not wait for.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
// The same after the last look at what others have: says nothing of what the thread wrote.
__device__ __forceinline__ void cluster_leave() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// A float in the shared memory of the cluster's block `rank`, at the same place as `own` here.
__device__ __forceinline__ float read_rank(const float* own, uint32_t rank) {
  float value = 0.f;
#if __CUDA_ARCH__ >= 900
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(own)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there) : "memory");
#endif
  return value;
}

}  // namespace localq::vq
