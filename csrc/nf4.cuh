// NF4 inside kernels: the sizes of the format (specified in localq/quant/nf4.py), and how a scale is read.
#pragma once

#include <cstdint>

#include "launchers.h"

namespace localq {

constexpr int kBlock = 64;           // weights that share one absmax
constexpr int kNestedBlock = 256;    // absmax codes that share one nested absmax
constexpr int kNestedMapSize = 256;  // values that an absmax code stands for
constexpr int kCodes = 16;           // values that a weight code stands for

// absmax of block `b` in f32, bit for bit as bitsandbytes: multiply, round, add, round. `map` is nested_map in shared
// memory.
template <bool kNested>
__device__ __forceinline__ float block_absmax(const Nf4& w, const float* map, int64_t b) {
  if constexpr (kNested) {
    const uint8_t code = static_cast<const uint8_t*>(w.absmax)[b];
    return __fadd_rn(__fmul_rn(map[code], w.nested_absmax[b / kNestedBlock]), w.offset);
  } else {
    return static_cast<const float*>(w.absmax)[b];
  }
}

}  // namespace localq
