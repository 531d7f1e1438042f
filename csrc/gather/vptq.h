// VPTQ to plain weights (vptq_dequantize.cu).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/types.h"

namespace localq {

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

// out [row_count, in] of `type` = the rows of a slab; row_begin is a multiple of vector_len; `stored`: the type of
// tables and norm.
void vptq_dequantize(const Vptq& w, Type stored, void* out, Type type, int64_t row_begin, int64_t row_count, int device,
                     cudaStream_t stream);

}  // namespace localq
