// What of the products whose weights lie row by row only a GPU can do, in one place, so that the rest runs on a CPU as
// well (tests/support/row_machine_on_cpu.cuh): loads that may be left out, byte permutes, products of bytes.
#pragma once

#include <cstdint>

#include "nf4_mma.cuh"  // mma

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

// The same of x, in shared or global memory.
__device__ __forceinline__ uint4 load_x(const uint8_t* at, int left, int needed) {
  uint4 v;
  asm volatile(
      "{.reg .pred p; setp.gt.s32 p, %5, %6; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;"
      "@p ld.v4.u32 {%0, %1, %2, %3}, [%4];}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(at), "r"(left), "r"(needed));
  return v;
}

// The same of shared memory, by its address there.
__device__ __forceinline__ uint4 load_shared(uint32_t at, int left, int needed) {
  uint4 v;
  asm volatile(
      "{.reg .pred p; setp.gt.s32 p, %5, %6; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;"
      "@p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "r"(at), "r"(left), "r"(needed));
  return v;
}

__device__ __forceinline__ uint32_t address_in_shared(const void* pointer) {
  return uint32_t(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ uint8_t* dynamic_memory() {
  extern __shared__ __align__(16) uint8_t row_memory[];
  return row_memory;
}

// Four bytes of the eight of `low` and `high`, by the nibbles of the low half of `selector`: bits 0 to 2 choose one,
// and where bit 3 is set its sign stands in all bits instead. (__byte_perm leaves bit 3 undefined.)
__device__ __forceinline__ uint32_t select_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
  return bytes;
}

// c += a b of signed bytes, m16n8k32: lane (g, t) has rows g and g + 8 of a and column g of b, bytes 4 t .. 4 t + 3 of
// either half. Exact. volatile, as above.
__device__ __forceinline__ void mma(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace localq
