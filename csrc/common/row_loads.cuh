// GPU intrinsics of the products with row-major weights: predicated loads and prefetches. Tests substitute a CPU
// version.
#pragma once

#include <cstdint>

#include "common/shared_memory.cuh"

namespace localq {

// 16 bytes of weights if more than `needed` bytes of the row are `left`, else zeros. Bypasses L1: weights are read
// once. volatile keeps loads and products in source order; other orders need more registers than there are.
__device__ __forceinline__ uint4 load_weights(const uint8_t* at, int left, int needed) {
  uint4 v;
  asm volatile(
      "{.reg .pred p; setp.gt.s32 p, %5, %6; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;"
      "@p ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(at), "r"(left), "r"(needed));
  return v;
}

// The same for two rows, except that a skipped load leaves its destination unchanged.
__device__ __forceinline__ void load_codes(uint4& a, uint4& b, const uint8_t* at_a, const uint8_t* at_b, int left,
                                           int needed) {
  asm volatile(
      "{.reg .pred p; setp.gt.s32 p, %10, %11;"
      "@p ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%8];"
      "@p ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%4, %5, %6, %7}, [%9];}"
      : "+r"(a.x), "+r"(a.y), "+r"(a.z), "+r"(a.w), "+r"(b.x), "+r"(b.y), "+r"(b.z), "+r"(b.w)
      : "l"(at_a), "l"(at_b), "r"(left), "r"(needed));
}

// load_weights for x, in shared or global memory.
__device__ __forceinline__ uint4 load_x(const uint8_t* at, int left, int needed) {
  uint4 v;
  asm volatile(
      "{.reg .pred p; setp.gt.s32 p, %5, %6; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;"
      "@p ld.v4.u32 {%0, %1, %2, %3}, [%4];}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(at), "r"(left), "r"(needed));
  return v;
}

// 16 bytes at the shared-memory address `at` if left > 0, else `to` is unchanged.
__device__ __forceinline__ void load_shared(uint32_t (&to)[4], uint32_t at, int left) {
  asm volatile("{.reg .pred p; setp.gt.s32 p, %5, 0; @p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];}"
               : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
               : "r"(at), "r"(left));
}

// Prefetches `bytes` from `at` into L2, from compute capability 9.0; a no-op below. Both are multiples of 16.
__device__ __forceinline__ void prefetch_bytes(const void* at, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(bytes));
#endif
}

// Returns `value`; the compiler computes it here, neither earlier nor again at a later use.
__device__ __forceinline__ uint32_t made_here(uint32_t value) {
  asm volatile("mov.u32 %0, %0;" : "+r"(value));
  return value;
}

}  // namespace localq
