// GPU intrinsics: shared memory by its addresses, and the number of the lane. Tests substitute a CPU version.
#pragma once

#include <cstdint>

namespace localq {

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

// 16 bytes to shared memory.
__device__ __forceinline__ void store_words(uint8_t* to, uint4 words) {
  *reinterpret_cast<uint4*>(to) = words;
}

}  // namespace localq
