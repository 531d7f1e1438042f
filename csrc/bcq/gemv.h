// Products with matrices in binary codes (gemv.cu), and their weights (dequantize.cu).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/gemv.h"
#include "common/types.h"

namespace localq {

constexpr int kMaxPlanes = 5;

// A matrix [out, in]: weight = sum over planes of sign * scale, plus the zero point of its group where there is one.
//   codes   u8, tiles of 16 rows (the last may have fewer): [tile][block of 128 columns][plane][row g of 8][word of 32
//           columns][rows g and g + 8]; bit i of a word is set where column i of its 32 has a
//           +; columns that fill up the last block have none
//   scales  f16 [tile][group][plane][row g][rows g and g + 8], then [tile][group][row g][..] of zero points: in each
//           tile all scales, then its zero points
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
void bcq_gemv(const BcqMatrix* matrices, int count, const GemvExtras& extras, const void* x, void* y, Type type,
              int rows, int device, cudaStream_t stream);

// out [row_count, in] of float16 or bfloat16 = rows from row_begin on, a multiple of 16.
void bcq_dequantize(const BcqMatrix& w, void* out, Type type, int64_t row_begin, int64_t row_count, int device,
                    cudaStream_t stream);

}  // namespace localq
