// Products with 8-bit weights (int8_gemv.cu).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/gemv.h"
#include "common/types.h"

namespace localq {

// A row-major matrix [out, in]: weight = code * scale of its row (localq/formats/int8).
struct Int8Matrix {
  const int8_t* codes;  // [out, in]
  const float* scales;  // [out]
  int64_t out, in;
};

// y [rows, sum of outs] = extras(x [rows, in] W^T) for `count` matrices with the same x. 1 to 8 rows, in % 16 == 0; x
// is float16 or bfloat16.
void int8_gemv(const Int8Matrix* matrices, int count, const GemvExtras& extras, const void* x, void* y, Type type,
               int rows, int device, cudaStream_t stream);

}  // namespace localq
