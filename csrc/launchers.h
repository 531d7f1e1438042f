// What the kernels offer to the bindings: one function per operation, device pointers and a stream, no Python.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace localq {

// The tensors of one matrix [out, in] but its shape.
//   codes          u8   [out, in/2]            even column = high nibble
//   absmax         u8   [out*in/64], or f32 where nested_absmax is null
//   nested_absmax  f32  [ceil(out*in/64/256)]
//   nested_map     f32  [256]
//   code_map       f32  [16]
struct Nf4 {
  const uint8_t* codes;
  const void* absmax;
  const float* nested_absmax;
  const float* nested_map;
  float offset;
  const float* code_map;
};

enum class Type : int { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2 };

// out [n] = dequantized weights.
void nf4_dequantize(const Nf4& w, void* out, Type type, int64_t n, int device, cudaStream_t stream);

// y [rows, out] = x [rows, in] W^T + bias; rows 1 to 8; type float16 or bfloat16; bias [out] or null.
void nf4_gemv(const Nf4& w, const void* x, const void* bias, void* y, Type type, int rows, int64_t out, int64_t in,
              int device, cudaStream_t stream);

}  // namespace localq
