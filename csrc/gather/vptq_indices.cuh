// How VPTQ's indices lie, inside kernels (localq/quant/vptq_codec.py).
#pragma once

#include <cstdint>

namespace localq {

// Number `column` of a row of packed indices of `bits` bits, the lowest first: it may begin in one word and end in the
// next. words: of the row; nothing is read behind them.
__device__ __forceinline__ uint32_t packed_index(const uint32_t* row, uint32_t column, uint32_t bits) {
  const uint32_t at = column * bits, shift = at % 32;
  const uint32_t low = row[at / 32];
  const uint32_t high = shift + bits > 32 ? row[at / 32 + 1] : 0;
  return __funnelshift_r(low, high, shift) & (~0u >> (32 - bits));
}

}  // namespace localq
