// Dequantization of tiled codes of additive codebooks of 256 codewords (dequantize.cu): vq2, and AQLM's 1x8 and 2x8.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/types.h"

namespace localq {

// A codebook [entries, length], at most 256 entries, and its codes in tiles, as in VqBook (gemv.h).
struct TiledBook {
  const uint8_t* codes;
  const void* codebook;
  int64_t entries, length, stride;
  int64_t before, tile_positions;
};

// A matrix [out, in], in % 8 == 0.
//   scales   [out], of the type of the codebooks
//   rounded  AQLM: the sum is rounded to that type, and so is its product with the scale; else the product is in f32
struct TiledMatrix {
  TiledBook book[2];
  int books;
  const void* scales;
  int64_t out, in;
  bool rounded;
};

// out [row_count, in] of `type` = the rows from row_begin, a multiple of 16; `stored`: the type of codebooks and
// scales.
void vq_dequantize(const TiledMatrix& w, Type stored, void* out, Type type, int64_t row_begin, int64_t row_count,
                   int device, cudaStream_t stream);

}  // namespace localq
