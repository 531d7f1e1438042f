// Products with additive codebooks of 256 codewords (gemv.cu): vq2, and AQLM's 1x8 and 2x8. Host API.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/gemv.h"
#include "common/types.h"
#include "common/workspace.h"

namespace localq {

constexpr int kMaxBooks = 2;  // codebooks per matrix

// A codebook and its codes: weight j of a row gets codeword[j - stride * h] of every code h that reaches it.
//   codes      u8, tiles of 16 rows (the last may have fewer): [tile][positions of all books][row of the tile]; those
//              of this book are positions before .. before + in / stride - 1 of `tile_positions`
//   fragments  f16, the codewords as operand A of m16n8k16: [16 of them][steps][32 lanes][8], zeros past the length;
//              the magnitudes of a codeword sum to at most 1
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

using VqWorkspace = Workspace;  // slices of columns are added there

// y [rows, sum of outs] = extras(x [rows, in] W^T) for `count` matrices with the same x and books of the same strides.
// 1 to 8 rows, in % 8 == 0; x is float16 or bfloat16. With signs u8 [in / 8] x is rotated after its norm, as by
// `hadamard` (hadamard.h): one row, in % 16 == 0.
void vq_gemv(const VqMatrix* matrices, int count, const GemvExtras& extras, const uint8_t* signs,
             const VqWorkspace& workspace, const void* x, void* y, Type type, int rows, int device,
             cudaStream_t stream);

}  // namespace localq
