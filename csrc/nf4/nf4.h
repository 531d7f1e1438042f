// Products with NF4 weights (gemv_launch.cu, gemm.cu), and their dequantization (dequantize.cu).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/gemv.h"
#include "common/types.h"

namespace localq {

// The tensors of one matrix [out, in].
//   codes          u8   [out, in/2]            even column = high nibble
//   absmax         u8   [out*in/64], or f32 where nested_absmax is null
//   nested_absmax  f32  [ceil(out*in/64/256)]
//   nested_map     f32  [256]
//   code_map       f32  [16]
//   tiled          codes and absmax in the order of layout.cuh instead of row by row
struct Nf4 {
  const uint8_t* codes;
  const void* absmax;
  const float* nested_absmax;
  const float* nested_map;
  float offset;
  const float* code_map;
  int64_t out, in;
  bool tiled;
};

// out [row_count, w.in] = dequantized weights of a slab of rows, row by row.
void nf4_dequantize(const Nf4& w, void* out, Type type, int64_t row_begin, int64_t row_count, int device,
                    cudaStream_t stream);

// y [rows, sum of outs] = extras(x [rows, in] W^T) for `count` matrices that share x and code_map; rows 1 to 8; type of
// x float16 or bfloat16.
void nf4_gemv(const Nf4* matrices, int count, const GemvExtras& extras, const void* x, void* y, Type type, int rows,
              int device, cudaStream_t stream);

// y [rows, w.out] = x [rows, w.in] W^T + bias (of the type of x, or null), for 9 and more rows; type of x float16 or
// bfloat16.
void nf4_gemm(const Nf4& w, const void* bias, const void* x, void* y, Type type, int64_t rows, int device,
              cudaStream_t stream);

}  // namespace localq
