// Weights of 4 bits, 16 values of its own for every row (gemv.cu, dequantize.cu).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/check.h"
#include "common/gemv.h"
#include "common/types.h"

namespace localq {

// A matrix [out, in] (localq/quant/squeezellm.py).
struct RowLut {
  const uint8_t* codes;  // [out, in / 2]   byte j: column 2 j in the low nibble, 2 j + 1 in the high one
  const void* table;     // f16 [out, 16]   what the codes of a row stand for
  int64_t out, in;
  bool tiled;  // codes lie as [out / 8][in / 128][row of the 8][64 bytes]; out % 8 == 0, in % 128 == 0
};

inline void check_rowlut_tiles(const RowLut& w, const char* op) {
  if (!w.tiled) return;
  require(w.out % 8 == 0, op, "out", w.out, "must be a multiple of 8 in tiles");
  require(w.in % 128 == 0, op, "in", w.in, "must be a multiple of 128 in tiles");
}

// y [rows, sum of outs] = extras(x [rows, in] W^T) for `count` matrices that share x, all in tiles or none; rows 1 to
// 8, in % 32 == 0; type of x float16 or bfloat16.
void rowlut_gemv(const RowLut* matrices, int count, const GemvExtras& extras, const void* x, void* y, Type type,
                 int rows, int device, cudaStream_t stream);

// out [row_count, w.in] = the weights of a slab of rows, row by row.
void rowlut_dequantize(const RowLut& w, void* out, Type type, int64_t row_begin, int64_t row_count, int device,
                       cudaStream_t stream);

}  // namespace localq
