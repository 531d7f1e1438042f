// Weights of 4 bits with a scale and a zero point for each group of columns (AWQ, GPTQ): what is offered.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/gemv.h"
#include "common/types.h"

namespace localq {

// The tensors of one matrix [out, in] in groups of `group` columns, the last may have fewer; groups = ceil(in / group).
// All are in tiled order (layout.cuh), columns in the order of their groups.
//   codes   u8   [out, in/2]
//   scales  S    [groups, out]
//   zeros   u8   [groups, out/2]
//   order   u16  [in] or null: the packed column k is column order[k] of x
struct Int4 {
  const uint8_t* codes;
  const void* scales;
  const uint8_t* zeros;
  const uint16_t* order;
  int64_t out, in, group;
};

// y [rows, sum of outs] = extras(x [rows, in] W^T) for `count` matrices that share x and its order; rows 1 to 8; types
// of x and of the scales (`stored`) float16 or bfloat16.
void int4_gemv(const Int4* matrices, int count, const GemvExtras& extras, const void* x, void* y, Type type,
               Type stored, int rows, int device, cudaStream_t stream);

// out [row_count, w.in] = dequantized weights of a slab of rows, row by row, packed columns (`order` is not looked at).
void int4_dequantize(const Int4& w, Type stored, void* out, Type type, int64_t row_begin, int64_t row_count, int device,
                     cudaStream_t stream);

}  // namespace localq
