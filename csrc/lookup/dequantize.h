// Tiled codes of additive codebooks of 256 codewords to plain weights (dequantize.cu): vq2, and AQLM's 1x8 and 2x8.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/types.h"

namespace localq {

// A codebook [entries, length], at most 256, and its codes in tiles, as VqBook (gemv.h) has them.
struct TiledBook {
  const uint8_t* codes;
  const void* codebook;
  int64_t entries, length, stride;
  int64_t before, tile_positions;
};

// A matrix [out, in], in % 8 == 0.
//   scales   [out] of the type of the codebooks
//   rounded  the sum is rounded to that type, its product with the scale again (AQLM); else the product is one of f32
struct TiledMatrix {
  TiledBook book[2];
  int books;
  const void* scales;
  int64_t out, in;
  bool rounded;
};

// out [row_count, in] of `type` = rows from row_begin on, a multiple of 16; `stored`: the type of codebooks and scales.
void vq_dequantize(const TiledMatrix& w, Type stored, void* out, Type type, int64_t row_begin, int64_t row_count,
                   int device, cudaStream_t stream);

}  // namespace localq
