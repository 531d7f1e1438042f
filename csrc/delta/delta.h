// A decode step (decode.cu) and a pass of many tokens (prefill.cu) of a gated delta net: host API.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/gemv.h"
#include "common/types.h"

namespace localq {

constexpr int kDeltaDim = 128;  // key_dim and value_dim
constexpr int kDeltaTaps = 4;   // of the convolution

// Operands of a step; H key heads, R value heads for each of them, C = (2 H + H R) * 128 channels: q, k, v.
//   inputs      T [C]            of the convolution, this token's
//   gates       T [H R * 128]    z
//   x           T [hidden]       what the projections read, before its norm
//   x_norm      [hidden]         its weight: T, or f32 for kOffset; x_kind, x_eps
//   write, decay   T [H R, hidden]   rows that give b and a
//   taps        T [C, 4]         of the convolution, the token's own last
//   rates       f32 [H R]        -exp(A_log)
//   offsets     f32 [H R]        dt_bias
//   norm        T [128]          weight of the gated norm; eps
//   columns     T [C, 3]         the last inputs, the latest last; moves on by one
//   matrix      f32 [H R, 128 keys, 128 values]   the state; moves on by one token
//   heads       f32 [H R * 128]  workspace: what the heads read
//   arrived     i32 [H]          workspace: zeros before the first call, which each call leaves
//   out         T [H R * 128]
struct DeltaStep {
  const void* inputs;
  const void* gates;
  const void* x;
  const void* x_norm;
  const void* write;
  const void* decay;
  const void* taps;
  const float* rates;
  const float* offsets;
  const void* norm;
  float eps, x_eps;
  NormKind x_kind;
  void* columns;
  float* matrix;
  float* heads;
  int32_t* arrived;
  void* out;
  int key_heads;
  int shared;  // R
  int hidden;
};

void delta_decode(const DeltaStep& step, Type type, int device, cudaStream_t stream);

// Operands of a pass of N tokens; H, R, C, taps, rates, offsets, norm and eps as above.
//   inputs      T [N, C]            of the convolution
//   gates       T [N, H R * 128]    z
//   write, decay   T [N, H R]       b and a
//   columns     T [C, 3]            the last inputs, the latest last; moves on by N
//   matrix      f32 [H R, 128 keys, 128 values]   the state; moves on by N tokens
//   workspace   bytes [chunks * delta_chunk_bytes(H, R)]
//   out         T [N, H R * 128]
//   chunks      of 64 tokens that go through the kernels together
struct DeltaPass {
  const void* inputs;
  const void* gates;
  const void* write;
  const void* decay;
  const void* taps;
  const float* rates;
  const float* offsets;
  const void* norm;
  float eps;
  void* columns;
  float* matrix;
  void* workspace;
  void* out;
  int key_heads;
  int shared;
  int tokens;
  int chunks;
};

void delta_prefill(const DeltaPass& pass, Type type, int device, cudaStream_t stream);

// Bytes of workspace for a chunk; localq/files/delta_memory.py has the same number.
int64_t delta_chunk_bytes(int key_heads, int shared);

}  // namespace localq
