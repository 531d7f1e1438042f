// Weights of 4 and 8 bits with scales apart from their codes (NVFP4, FP8, integers of 8 bits): host API.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/gemv.h"
#include "common/types.h"

namespace localq {

// What codes and scales are; the numbers are those of localq/formats/scaled/kernel.py.
enum class ScaledKind : int {
  kNvfp4 = 0,      // E2M1, an e4m3 scale per 16 columns
  kFp8Blocks = 1,  // e4m3, an f32 scale per 16 rows and 64 columns
  kFp8Rows = 2,    // e4m3
  kInt8Rows = 3,   // code - 128
  kInt8By32 = 4,   // code - zero point, an f32 scale and a zero point per 32 columns of a row
  kInt8By64 = 5,   // the same per 64
  kInt8By128 = 6,  // the same per 128
};

// One matrix [out, in] in tiled order (layout.cuh).
//   codes    u8 [out, in / 2] (NVFP4) or [out, in]
//   scales   of the kind; null for kinds of rows
//   zeros    u8 [groups, out] or null
//   factors  f32 [1], [out] or null: multiplies what codes and scales give
//   by_row   there is a factor for each row
//   divides  the factor divides instead
//   through  the type to which the definition rounds weights first
struct ScaledMatrix {
  const uint8_t* codes;
  const uint8_t* scales;
  const uint8_t* zeros;
  const float* factors;
  int64_t out, in;
  bool by_row, divides;
  Type through;
};

// y [rows, sum of outs] = extras(x [rows, in] W^T) for `count` matrices of one kind with the same x. 1 to 8 rows; x is
// float16 or bfloat16.
void scaled_gemv(const ScaledMatrix* matrices, int count, ScaledKind kind, const GemvExtras& extras, const void* x,
                 void* y, Type type, int rows, int device, cudaStream_t stream);

// out [row_count, w.in] = dequantized weights of a slab of rows, row-major; whole tiles of 16 rows. Each is rounded to
// w.through, then to `type`.
void scaled_dequantize(const ScaledMatrix& w, ScaledKind kind, void* out, Type type, int64_t row_begin,
                       int64_t row_count, int device, cudaStream_t stream);

}  // namespace localq
