// Products with additive codebooks of 256 codewords (gemv.cu): vq2, and AQLM's 1x8 and 2x8.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/gemv.h"
#include "common/types.h"

namespace localq {

constexpr int kMaxBooks = 2;  // codebooks of one matrix

// A codebook and its codes: weight j of a row gets codeword[j - stride * h] of every code h that reaches it.
//   codes      u8, tiles of 16 rows (the last may have fewer): [tile][positions of all books][row of the tile]; those
//              of this book are positions before .. before + in / stride - 1 of `tile_positions`
//   fragments  f16, the codewords as operand A of m16n8k16: [16 of them][steps][32 lanes][8], zeros behind the length;
//              no sum of magnitudes of a codeword is above 1
struct VqBook {
  const uint8_t* codes;
  const void* fragments;
  int64_t stride, steps;  // a codeword has at most 16 * steps weights
  int64_t before, tile_positions;
};

// A matrix [out, in]: weight = scales[row] * factor * sum of codewords.
struct VqMatrix {
  VqBook book[kMaxBooks];
  int books;
  const void* scales;  // f16 or bf16 [out]
  bool scales_bf16;
  float factor;
  int64_t out, in;
};

// Where slices of columns meet: every word is kVacant before and after every launch, which writes each that it uses
// once and reads it once. One stream of a device at a time.
struct VqWorkspace {
  uint32_t* meeting;
  int64_t words;
};
constexpr uint32_t kVacant = 0xffffffffu;

// y [rows, sum of outs] = extras(x [rows, in] W^T) for `count` matrices that share x and have books of the same
// strides; rows 1 to 8, in % 8 == 0; type of x float16 or bfloat16. With signs u8 [in / 8] x, behind its norm, is
// rotated first, as by `hadamard` (hadamard.h): one row, in % 16 == 0.
void vq_gemv(const VqMatrix* matrices, int count, const GemvExtras& extras, const uint8_t* signs,
             const VqWorkspace& workspace, const void* x, void* y, Type type, int rows, int device,
             cudaStream_t stream);

}  // namespace localq
