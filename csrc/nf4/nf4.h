// Products with NF4 weights (gemv_launch.cu, gemm.cu), and their dequantization (dequantize.cu).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/gemv.h"
#include "common/types.h"
#include "common/workspace.h"

namespace localq {

// The tensors of one matrix [out, in].
//   codes          u8   [out, in/2]            even column = high nibble
//   absmax         u8   [out*in/64], or f32 if nested_absmax is null
//   nested_absmax  f32  [ceil(out*in/64/256)]
//   nested_map     f32  [256]
//   code_map       f32  [16]
//   tiled          codes and absmax are in the tiled order of layout.cuh, else row-wise
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

// out [row_count, w.in] = dequantized weights of a slab of rows, row-major.
void nf4_dequantize(const Nf4& w, void* out, Type type, int64_t row_begin, int64_t row_count, int device,
                    cudaStream_t stream);

// y [rows, sum of outs] = extras(x [rows, in] W^T) for `count` matrices with the same x and code_map. 1 to 8 rows; x is
// float16 or bfloat16. One row of tiled matrices uses the workspace where whole units are badly spread over the device;
// where it has too few words, the launch is slower.
void nf4_gemv(const Nf4* matrices, int count, const GemvExtras& extras, const Workspace& workspace, const void* x,
              void* y, Type type, int rows, int device, cudaStream_t stream);

// y [rows, w.out] = x [rows, w.in] W^T + bias (of the type of x, or null), for 9 or more rows; x is float16 or
// bfloat16.
void nf4_gemm(const Nf4& w, const void* bias, const void* x, void* y, Type type, int64_t rows, int device,
              cudaStream_t stream);

}  // namespace localq
