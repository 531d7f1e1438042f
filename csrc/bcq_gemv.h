// Products with matrices in binary codes (bcq_gemv.cu), and their weights (bcq_dequantize.cu).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "vq_gemv.h"

namespace localq {

constexpr int kMaxPlanes = 5;

// A matrix [out, in]: weight = sum over planes of sign * scale, plus the zero point of its group where there is one.
//   codes   u8, tiles of 16 rows (the last may have fewer): [tile][plane][in / 8 positions][row of the tile]; bit j of
//   a
//           code is set where column j of its eight has a +. In whole blocks of 1,024 columns four positions lie as
//           number 8 i + g, where the columns have them as number 4 g + i (localq/quant/bcq_tiles.py)
//   scales  f16 [tile][planes, then the zero point][groups][row of the tile]
//   group   columns that share a scale: a power of two from 32 on, of which the last group may lack some, or in
struct BcqMatrix {
  const uint8_t* codes;
  const void* scales;
  int planes;
  bool zero_point;
  int64_t group, out, in;
};

// y [rows, sum of outs] = extras(x [rows, in] W^T) for `count` matrices that share x and have as many planes and
// groups; rows 1 to 8, in % 8 == 0; type of x float16 or bfloat16.
//   fragments  the 256 sign vectors over 8, as operand A of m16n8k16 (vq_gemv.h): bit j of a code is the sign of weight
//   j
void bcq_gemv(const BcqMatrix* matrices, int count, const void* fragments, const GemvExtras& extras,
              const VqWorkspace& workspace, const void* x, void* y, Type type, int rows, int device,
              cudaStream_t stream);

// out [row_count, in] of float16 or bfloat16 = rows from row_begin on, a multiple of 16.
void bcq_dequantize(const BcqMatrix& w, void* out, Type type, int64_t row_begin, int64_t row_count, int device,
                    cudaStream_t stream);

}  // namespace localq
