// Numbers of 4 and 8 bits as f16.
//
// A code of E2M1 is the upper byte of an f16 that is the value times 2^-14, a code of e4m3 shifted right by one is the
// upper bits of one that is the value times 2^-8; subnormals too.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace localq {

// Upper bytes of both halves, e4m3, as halves: times 2^-8.
__device__ __forceinline__ uint32_t e4m3_halves(uint32_t upper) {
  return (upper & 0x80008000u) | (upper >> 1 & 0x3f803f80u);
}

// A word of nibbles in E2M1 as an operand A of m16n8k16: times 2^-14. Byte i of the word has two rows of one column,
// the first in the low nibble; columns c, c + 2, c + 1, c + 3.
__device__ __forceinline__ void spread_e2m1(uint32_t (&a)[4], uint32_t word) {
  const uint32_t low = (word << 1 & 0x0e0e0e0eu) | (word << 4 & 0x80808080u);
  const uint32_t high = (word >> 3 & 0x0e0e0e0eu) | (word & 0x80808080u);
  a[0] = __byte_perm(low, 0u, 0x2404), a[1] = __byte_perm(high, 0u, 0x2404);
  a[2] = low & 0xff00ff00u, a[3] = high & 0xff00ff00u;
}

}  // namespace localq
