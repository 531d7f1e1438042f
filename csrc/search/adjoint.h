// The adjoint of decoding additive codebooks (localq/quantizer): what every codeword of a book gathers of a matrix.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace localq {

// sums f32 [shares, 256, length]: sums[i][k][j] is the sum of matrix[r][stride * h + j] over the rows r of share i and
// the positions h with codes[r][h] = k, as far as that column is there. matrix f32 [rows, columns]; codes u8 [rows,
// positions], positions * stride = columns; length at most 32. Rows are cut evenly into 1 to `rows` shares.
void vq_adjoint(const float* matrix, const uint8_t* codes, float* sums, int64_t rows, int64_t columns, int stride,
                int length, int64_t shares, int device, cudaStream_t stream);

}  // namespace localq
