// Packed indices of VPTQ (localq/formats/vptq/codec.py).
#pragma once

#include <cstdint>

namespace localq {

// Index `column` of a row of packed indices of `bits` bits, lowest bits first; an index can span two words. words: per
// row; nothing past them is read.
__device__ __forceinline__ uint32_t packed_index(const uint32_t* row, uint32_t column, uint32_t bits) {
  const uint32_t at = column * bits, shift = at % 32;
  const uint32_t low = row[at / 32];
  const uint32_t high = shift + bits > 32 ? row[at / 32 + 1] : 0;
  return __funnelshift_r(low, high, shift) & (~0u >> (32 - bits));
}

}  // namespace localq
