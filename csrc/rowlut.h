// Weights of 4 bits, 16 values of its own for every row (rowlut_gemv.cu, rowlut_dequantize.cu).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "gemv.h"
#include "launchers.h"

namespace localq {

// A matrix [out, in], row by row (localq/quant/squeezellm.py).
struct RowLut {
  const uint8_t* codes;  // [out, in / 2]   byte j: column 2 j in the low nibble, 2 j + 1 in the high one
  const void* table;     // f16 [out, 16]   what the codes of a row stand for
  int64_t out, in;
};

// y [rows, sum of outs] = extras(x [rows, in] W^T) for `count` matrices that share x; rows 1 to 8, in % 32 == 0; type
// of x float16 or bfloat16.
void rowlut_gemv(const RowLut* matrices, int count, const GemvExtras& extras, const void* x, void* y, Type type,
                 int rows, int device, cudaStream_t stream);

// out [row_count, w.in] = the weights of a slab of rows, row by row.
void rowlut_dequantize(const RowLut& w, void* out, Type type, int64_t row_begin, int64_t row_count, int device,
                       cudaStream_t stream);

}  // namespace localq
