// vq_gemv: what only a GPU can do, in one place, so that the rest runs on a CPU as well
// (tests/support/kernels/vq_machine_on_cpu.cuh).
#pragma once

#include <cstdint>

#include "common/mma.cuh"
#include "common/shared_memory.cuh"

namespace localq::vq {

// 16 bytes of codes, which are read once: kept out of L1. volatile, as above.
__device__ __forceinline__ uint4 load_codes(const uint8_t* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

// kWords words of scales. volatile, as above; L1 keeps what other lanes' loads have of the same line.
__device__ __forceinline__ void load_scales(uint32_t (&to)[2], const void* from) {
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
}
__device__ __forceinline__ void load_scales(uint32_t (&to)[4], const void* from) {
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "l"(from));
}
__device__ __forceinline__ void load_scales(uint32_t (&to)[8], const void* from) {
  uint32_t low[4], high[4];
  load_scales(low, from);
  load_scales(high, static_cast<const uint8_t*>(from) + 16);
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = low[i], to[4 + i] = high[i];
}

// 16 bytes of codewords, which L1 keeps. volatile: loaded where it is written, not kept in registers until then.
__device__ __forceinline__ uint4 load_fragment(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

// A word that blocks hand over, whole and by itself: orders nothing else.
__device__ __forceinline__ void put(uint32_t* to, uint32_t word) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}
// As it is now, or zero; without a branch, so that many are under way together.
__device__ __forceinline__ uint32_t get_if(bool wanted, const uint32_t* from) {
  uint32_t word = 0;
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n @p ld.relaxed.gpu.global.u32 %0, [%1];\n}"
               : "+r"(word)
               : "l"(from), "r"(uint32_t(wanted))
               : "memory");
  return word;
}

}  // namespace localq::vq
