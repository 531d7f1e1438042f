// Products with 16-bit weights (dense_gemv.cu).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/gemv.h"
#include "common/types.h"

namespace localq {

// A matrix T [out, in], row by row.
struct DenseMatrix {
  const void* weights;
  int64_t out, in;
};

// y [rows, sum of outs] = extras(x [rows, in] W^T) for `count` matrices that share x; rows 1 to 8, in % 8 == 0; T
// float16 or bfloat16, of x as well.
void dense_gemv(const DenseMatrix* matrices, int count, const GemvExtras& extras, const void* x, void* y, Type type,
                int rows, int device, cudaStream_t stream);

}  // namespace localq
