// The rotation of the inputs of vq2 (hadamard.cu).
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/types.h"

namespace localq {

constexpr uint32_t kLargestBlock = 4096;  // LARGEST_BLOCK

// Columns of a Hadamard block: the largest power of two that divides `in`, at most kLargestBlock; and what its sums are
// multiplied by.
inline uint32_t hadamard_block(int64_t in) {
  return uint32_t(std::min<int64_t>(in & -in, kLargestBlock));
}
inline float hadamard_scale(uint32_t block) {
  return float(1 / std::sqrt(double(block)));
}

// out [rows, in] = H (signs * x) (localq/quant/hadamard.py), rounded once to the type of x: float16 or bfloat16. in is
// a multiple of 16; signs u8 [in / 8], a set bit is a minus. out may be x.
void hadamard(const void* x, const uint8_t* signs, void* out, Type type, int64_t rows, int64_t in, int device,
              cudaStream_t stream);

}  // namespace localq
