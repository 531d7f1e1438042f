// 4-bit weights with a scale and a zero point per group of columns (AWQ, GPTQ): host API.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/gemv.h"
#include "common/types.h"

namespace localq {

// The tensors of one matrix [out, in] in groups of `group` columns, the last may have fewer; groups = ceil(in / group).
// All are in tiled order (layout.cuh), columns in group order.
//   codes   u8   [out, in/2]
//   scales  S    [groups, out]
//   zeros   u8   [groups, out/2]
//   order   u16  [in] or null: packed column k is column order[k] of x
struct Int4 {
  const uint8_t* codes;
  const void* scales;
  const uint8_t* zeros;
  const uint16_t* order;
  int64_t out, in, group;
};

// y [rows, sum of outs] = extras(x [rows, in] W^T) for `count` matrices with the same x and the same order. 1 to 8
// rows; x and the scales (type `stored`) are float16 or bfloat16.
void int4_gemv(const Int4* matrices, int count, const GemvExtras& extras, const void* x, void* y, Type type,
               Type stored, int rows, int device, cudaStream_t stream);

// out [row_count, w.in] = dequantized weights of a slab of rows, row-major, packed columns (`order` is not applied).
void int4_dequantize(const Int4& w, Type stored, void* out, Type type, int64_t row_begin, int64_t row_count, int device,
                     cudaStream_t stream);

}  // namespace localq
