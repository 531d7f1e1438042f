// Weights in the blocks of GGUF files: host API.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/gemv.h"
#include "common/types.h"

namespace localq {

// The block types with kernels, by ggml's numbers.
enum class GgufType : int {
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ2_K = 10,
  kQ3_K = 11,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kIQ2_XXS = 16,
  kIQ2_XS = 17,
  kIQ3_XXS = 18,
  kIQ1_S = 19,
  kIQ4_NL = 20,
  kIQ3_S = 21,
  kIQ2_S = 22,
  kIQ4_XS = 23,
  kIQ1_M = 29,
  kTQ1_0 = 34,
  kTQ2_0 = 35,
  kNVFP4 = 40,
};

// One matrix [out, in]: its blocks in tiled order (layout.cuh), as many bytes as in the file.
//   places   u16 [in / 8] or null: columns 8 i .. 8 i + 7 of x meet the stored columns from 8 places[i] on
//   factor   multiplies the weights; 1 of all types but NVFP4
struct GgufMatrix {
  const uint8_t* blocks;
  const uint16_t* places;
  int64_t out, in;
  float factor;
};

// y [rows, sum of outs] = extras(x [rows, in] W^T) for `count` matrices of one type with the same x and places. 1 to 8
// rows; x is float16 or bfloat16.
void gguf_gemv(const GgufMatrix* matrices, int count, GgufType of, const GemvExtras& extras, const void* x, void* y,
               Type type, int rows, int device, cudaStream_t stream);

// out [row_count, w.in] = dequantized weights of a slab of rows, row-major, columns as stored; whole tiles of 16 rows.
void gguf_dequantize(const GgufMatrix& w, GgufType of, void* out, Type type, int64_t row_begin, int64_t row_count,
                     int device, cudaStream_t stream);

}  // namespace localq
