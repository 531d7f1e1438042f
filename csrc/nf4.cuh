// NF4 inside kernels: the sizes of the format (specified in localq/quant/nf4.py), and how a scale is read.
#pragma once

#include <cstdint>

#include "check.h"
#include "launchers.h"

namespace localq {

constexpr int kBlock = 64;           // weights that share one absmax
constexpr int kNestedBlock = 256;    // absmax codes that share one nested absmax
constexpr int kNestedMapSize = 256;  // values that an absmax code stands for
constexpr int kCodes = 16;           // values that a weight code stands for

inline void require_nf4(const Nf4& w, const char* op) {
  require_aligned(w.codes, 16, op, "codes");
  require_aligned(w.absmax, w.nested_absmax != nullptr ? 1 : 4, op, "absmax");
  require_aligned(w.code_map, 4, op, "code_map");
  if (w.nested_absmax == nullptr) return;
  require_aligned(w.nested_absmax, 4, op, "nested_absmax");
  require_aligned(w.nested_map, 4, op, "nested_map");
}

// The scale of a block as stored. Loading and decoding are apart, so that loads can be in flight while others work.
struct StoredAbsmax {
  float scale;    // nested absmax, or the absmax itself
  uint32_t code;  // into nested_map
};

template <bool kNested>
__device__ __forceinline__ StoredAbsmax load_absmax(const Nf4& w, int64_t block) {
  if constexpr (kNested) {
    return {w.nested_absmax[block / kNestedBlock], static_cast<const uint8_t*>(w.absmax)[block]};
  } else {
    return {static_cast<const float*>(w.absmax)[block], 0u};
  }
}

// absmax in f32, bit for bit as bitsandbytes: multiply, round, add, round. `map` is nested_map in shared memory.
template <bool kNested>
__device__ __forceinline__ float decode_absmax(StoredAbsmax stored, const float* map, float offset) {
  return kNested ? __fadd_rn(__fmul_rn(map[stored.code], stored.scale), offset) : stored.scale;
}

}  // namespace localq
