// Additive codebooks to plain weights (additive_dequantize.cu).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/types.h"

namespace localq {

// Codebooks of one stride and length, and their codes (localq/quant/additive.py).
//   codes      u8 or, where `wide`, u16 [out / out_group, in / stride, books]; they count modulo `entries`. Where
//              tile_positions is not 0: u8 in tiles of 16 rows, as VqBook (gemv.h) has them, of one book
//   codebooks  [books, entries, length], a power of two of entries. A codeword holds the weights of out_group rows, row
//              after row, length / out_group of each: a multiple of stride
struct CodeSet {
  const void* codes;
  const void* codebooks;
  int64_t books, entries, length, stride;
  bool wide;
  int64_t before, tile_positions;
};

// A matrix [out, in].
//   sets     one or two; the terms of the second are added to the sum of the first
//   scales   [out / out_group] of the type of the codebooks
//   rounded  the sum is rounded to that type, its product with the scale again (AQLM); else the product is one of f32
struct Additive {
  CodeSet set[2];
  int sets;
  const void* scales;
  int64_t out, in, out_group;
  bool rounded;
};

// out [row_count, in] of `type` = the rows of a slab, whole groups of rows; `stored`: the type of codebooks and scales.
void additive_dequantize(const Additive& w, Type stored, void* out, Type type, int64_t row_begin, int64_t row_count,
                         int device, cudaStream_t stream);

}  // namespace localq
