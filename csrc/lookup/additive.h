// Additive codebooks and VPTQ to plain weights (additive_dequantize.cu, gather/vptq_dequantize.cu).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "nf4/nf4.h"

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

// A matrix [out, in] (localq/quant/vptq.py says what all of these are); tables and norm are of one type.
//   indices            packed u32 [groups, vectors, words], or u16 [groups, vectors, group_size] where words is 0
//   res_indices        u16 [groups, vectors, group_size], where unpacked and with residuals, else null
//   centroids          [groups, count, vector_len];  res_centroids [groups, residuals, vector_len] or null
//   outlier_indices    u16 [ceil(out / outlier_len), outliers];  outlier_centroids [outlier_count, outlier_len]
//   places             u16 [in] or null: where each column lies;  scale, bias  [in], both or null
struct Vptq {
  const void* indices;
  const uint16_t* res_indices;
  const void *centroids, *res_centroids;
  const uint16_t* outlier_indices;
  const void* outlier_centroids;
  const uint16_t* places;
  const void *scale, *bias;
  int64_t out, in, groups, group_size, words;
  int64_t vector_len, count, residuals, outliers, outlier_len, outlier_count;
};

// out [row_count, in] of `type` = the rows of a slab, whole groups of rows; `stored`: the type of codebooks and scales.
void additive_dequantize(const Additive& w, Type stored, void* out, Type type, int64_t row_begin, int64_t row_count,
                         int device, cudaStream_t stream);

// The same; row_begin is a multiple of vector_len; `stored`: the type of tables and norm.
void vptq_dequantize(const Vptq& w, Type stored, void* out, Type type, int64_t row_begin, int64_t row_count, int device,
                     cudaStream_t stream);

}  // namespace localq
