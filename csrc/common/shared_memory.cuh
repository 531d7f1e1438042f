// GPU intrinsics: dynamic shared memory, loads by shared-memory address, and the lane id. Tests substitute a CPU
// version.
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

// The lane id, read again at each call so that values derived from it are recomputed instead of kept in registers.
__device__ __forceinline__ uint32_t fresh_lane() {
  uint32_t lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// kWords 4-byte words of shared memory at `address` + kOffset, or the low half of one. volatile keeps look-ups and
// products in source order; other orders need more registers than there are.
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

// Stores 16 bytes to shared memory.
__device__ __forceinline__ void store_words(uint8_t* to, uint4 words) {
  *reinterpret_cast<uint4*>(to) = words;
}

}  // namespace localq
