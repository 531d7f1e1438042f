// Rows of the embedding table (embed.cu).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/types.h"

namespace localq {

// out T [rows, hidden] = table[ids] * scale. ids i64 [rows], each from 0 to vocab - 1 (the caller's promise); table T
// [vocab, hidden] on the device or in pinned host memory. hidden % 8 == 0.
void embed(const int64_t* ids, const void* table, float scale, void* out, Type type, int64_t rows, int64_t hidden,
           int device, cudaStream_t stream);

}  // namespace localq
