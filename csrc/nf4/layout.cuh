// NF4 inside kernels: the sizes of the format (specified in localq/quant/nf4.py), its two orders, how a scale is read.
//
// Row-wise order is bitsandbytes' own. Tiled order is the same bytes as the products read them, made once at load
// (localq/quant/nf4_tiles.py) and undone as easily. Of a matrix with `blocks` = in / 64, a tile is 16 whole rows; lane
// = 4 g + t of a warp holds rows g and g + 8 of it:
//   codes   byte j of lane t's 8 bytes (columns 16 t .. 16 t + 15) of row g + 8 h, block b of tile T:
//           ((T * blocks + b) * 32 + lane) * 16 + 8 h + j            so a warp reads a block of a tile as 512 bytes
//   absmax  chunk c = 8 blocks: (T * blocks + 8 c) * 16 + lane * 4 + 2 h + i is that of row g + 8 h, block 8 c + 2 t +
//   i;
//           a last chunk of n < 8 blocks lies row by row: (T * blocks + 8 c) * 16 + row * n + (b - 8 c)
// Rows that fill no tile stay row-wise, at their row-wise place. Nested absmax are never reordered.
#pragma once

#include <cstdint>

#include "common/check.h"
#include "nf4/nf4.h"

namespace localq {

constexpr int kBlock = 64;           // weights that share one absmax
constexpr int kNestedBlock = 256;    // absmax codes that share one nested absmax
constexpr int kNestedMapSize = 256;  // values that an absmax code stands for
constexpr int kCodes = 16;           // values that a weight code stands for

inline void require_nf4(const Nf4& w, const char* op) {
  require_aligned(w.codes, 16, op, "codes");
  require_aligned(w.absmax, w.tiled ? 16 : w.nested_absmax != nullptr ? 1 : 4, op, "absmax");
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
__device__ __forceinline__ StoredAbsmax load_absmax(const Nf4& w, int64_t block) {  // row by row
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
