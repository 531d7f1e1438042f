// The rotation of the inputs of vq2 (hadamard.cu).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "launchers.h"

namespace localq {

// out [rows, in] = H (signs * x) (localq/quant/hadamard.py), rounded once to the type of x: float16 or bfloat16. in is
// a multiple of 16; signs u8 [in / 8], a set bit is a minus. out may be x.
void hadamard(const void* x, const uint8_t* signs, void* out, Type type, int64_t rows, int64_t in, int device,
              cudaStream_t stream);

}  // namespace localq
