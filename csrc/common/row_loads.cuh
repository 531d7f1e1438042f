// What of the products whose weights lie row by row only a GPU can do, in one place, so that the rest runs on a CPU as
// well (tests/support/kernels/row_machine_on_cpu.cuh): loads that may be left out.
#pragma once

#include <cstdint>

#include "common/shared_memory.cuh"

namespace localq {

// 16 bytes of weights where more than `needed` are left of the row, else zeros. They are read once: kept out of L1.
// volatile keeps the order in which loads and products are written, which is what fits the registers.
__device__ __forceinline__ uint4 load_weights(const uint8_t* at, int left, int needed) {
  uint4 v;
  asm volatile(
      "{.reg .pred p; setp.gt.s32 p, %5, %6; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;"
      "@p ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(at), "r"(left), "r"(needed));
  return v;
}

// The same of two rows, but that what is left out stays as it is.
__device__ __forceinline__ void load_codes(uint4& a, uint4& b, const uint8_t* at_a, const uint8_t* at_b, int left,
                                           int needed) {
  asm volatile(
      "{.reg .pred p; setp.gt.s32 p, %10, %11;"
      "@p ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%8];"
      "@p ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%4, %5, %6, %7}, [%9];}"
      : "+r"(a.x), "+r"(a.y), "+r"(a.z), "+r"(a.w), "+r"(b.x), "+r"(b.y), "+r"(b.z), "+r"(b.w)
      : "l"(at_a), "l"(at_b), "r"(left), "r"(needed));
}

// The first, of x in shared or global memory.
__device__ __forceinline__ uint4 load_x(const uint8_t* at, int left, int needed) {
  uint4 v;
  asm volatile(
      "{.reg .pred p; setp.gt.s32 p, %5, %6; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;"
      "@p ld.v4.u32 {%0, %1, %2, %3}, [%4];}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(at), "r"(left), "r"(needed));
  return v;
}

// 16 bytes of shared memory, by its address there, where anything is `left`; else `to` stays as it is.
__device__ __forceinline__ void load_shared(uint32_t (&to)[4], uint32_t at, int left) {
  asm volatile("{.reg .pred p; setp.gt.s32 p, %5, 0; @p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];}"
               : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
               : "r"(at), "r"(left));
}

// `bytes` from `at` on into L2, on cards that have an instruction for it; both multiples of 16.
__device__ __forceinline__ void prefetch_bytes(const void* at, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(bytes));
#endif
}

// The same value, made here: neither earlier nor once more where it is used.
__device__ __forceinline__ uint32_t made_here(uint32_t value) {
  asm volatile("mov.u32 %0, %0;" : "+r"(value));
  return value;
}

}  // namespace localq
