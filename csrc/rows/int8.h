// Products with 8-bit weights (int8_gemv.cu).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/gemv.h"
#include "common/types.h"

namespace localq {

// A matrix [out, in], row by row: weight = code * scale of its row (localq/quant/int8.py).
struct Int8Matrix {
  const int8_t* codes;  // [out, in]
  const float* scales;  // [out]
  int64_t out, in;
};

// y [rows, sum of outs] = extras(x [rows, in] W^T) for `count` matrices that share x; rows 1 to 8, in % 16 == 0; type
// of x float16 or bfloat16.
void int8_gemv(const Int8Matrix* matrices, int count, const GemvExtras& extras, const void* x, void* y, Type type,
               int rows, int device, cudaStream_t stream);

}  // namespace localq
