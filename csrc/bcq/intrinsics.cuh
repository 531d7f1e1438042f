// bcq_gemv: what only a GPU can do, in one place, so that the rest runs on a CPU as well
// (tests/support/kernels/bcq_machine_on_cpu.cuh).
#pragma once

#include <cstdint>

#include "lookup/intrinsics.cuh"  // shared_memory

namespace localq::bcq {

// m16n8k128 of bits, what both have counted: A is 16 rows, of which the lane has 32 bits of rows g and g + 8, B is 8
// columns, of which it has 32 bits of column g; c as of any m16n8. From compute capability 10.0 on tensor cores have no
// bits: nvcc makes five products of bytes of it and transposes operands for them. kBytes, where registers are not
// short: there every eighth bit is a byte of m16n8k32, two times 16 columns in each of four.
template <bool kBytes>
__device__ __forceinline__ void count_bits(int (&c)[4], uint32_t low, uint32_t high, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  if constexpr (kBytes) {
    constexpr uint32_t kOnes = 0x01010101u;
#pragma unroll
    for (int bit = 0; bit < 8; bit += 2) {
      asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
          : "r"(low >> bit & kOnes), "r"(high >> bit & kOnes), "r"(low >> (bit + 1) & kOnes),
            "r"(high >> (bit + 1) & kOnes), "r"(b >> bit & kOnes), "r"(b >> (bit + 1) & kOnes));
    }
    return;
  }
#endif
  asm("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(low), "r"(high), "r"(b));
}

// 8 bytes of codes if `some`, without a branch; they are read once: kept out of L1.
__device__ __forceinline__ void load_codes(uint2& to, const uint8_t* from, bool some) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %3, 0;\n"
      " @p ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];\n}"
      : "+r"(to.x), "+r"(to.y)
      : "l"(from), "r"(uint32_t(some)));
}

// Two f16, which L1 keeps, likewise. volatile, as above: loaded where it is written.
__device__ __forceinline__ void load_scales(uint32_t& to, const uint8_t* from, bool some) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n @p ld.global.nc.u32 %0, [%1];\n}"
               : "+r"(to)
               : "l"(from), "r"(uint32_t(some)));
}

// Asks for a line into L2.
__device__ __forceinline__ void prefetch_line(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

// 8 bytes of shared memory.
__device__ __forceinline__ uint2 load_bits(const uint8_t* from) {
  return *reinterpret_cast<const uint2*>(from);
}
__device__ __forceinline__ void store_bits(uint8_t* to, uint2 bits) {
  *reinterpret_cast<uint2*>(to) = bits;
}

// `sum` and both halves of `pair`, signed.
__device__ __forceinline__ int add_halves(uint32_t pair, int sum) {
  return __dp2a_lo(int(pair), 0x0101, sum);
}

}  // namespace localq::bcq
