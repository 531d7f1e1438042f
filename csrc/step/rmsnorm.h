// RMSNorm of whole rows outside a matrix-vector product (rmsnorm.cu).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/types.h"

namespace localq {

// out T [rows, width] = residual + norm(x), the norm rounded to T first. x, residual (or null) T [rows, width];
// residual and out may be the same; weight [width]: T (plain) or f32 (offset), common/gemv.h. width % 8 == 0.
void rmsnorm(const void* x, NormKind kind, const void* weight, float eps, const void* residual, void* out, Type type,
             int64_t rows, int64_t width, int device, cudaStream_t stream);

}  // namespace localq
