// Products with 16-bit weights (dense_gemv.cu).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/gemv.h"
#include "common/types.h"

namespace localq {

// A row-major matrix T [out, in].
struct DenseMatrix {
  const void* weights;
  int64_t out, in;
};

// y [rows, sum of outs] = extras(x [rows, in] W^T) for `count` matrices with the same x. 1 to 8 rows, in % 8 == 0; x
// and W are both float16 or both bfloat16.
void dense_gemv(const DenseMatrix* matrices, int count, const GemvExtras& extras, const void* x, void* y, Type type,
                int rows, int device, cudaStream_t stream);

}  // namespace localq
