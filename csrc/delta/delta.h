// A decode step of one token (decode.cu) or several (verify.cu), and a pass of many tokens (prefill.cu), of a gated
// delta net: host API.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/gemv.h"
#include "common/types.h"

namespace localq {

constexpr int kDeltaDim = 128;     // key_dim and value_dim
constexpr int kDeltaTaps = 4;      // of the convolution
constexpr int kMostDeltaRows = 8;  // tokens of a step

// Operands of all, for N tokens (1 in a step of one token). H key heads, R value heads for each of them, C = (2 H + H
// R) * 128 channels: q, k, v.
//   inputs      T [N, C]            of the convolution
//   gates       T [N, H R * 128]    z
//   taps        T [C, 4]            of the convolution, the token's own last
//   rates       f32 [H R]           -exp(A_log)
//   offsets     f32 [H R]           dt_bias
//   norm        T [128]             weight of the gated norm; eps
//   columns     T [C, 3]            the last inputs, the latest last; shifted by N
//   matrix      f32 [H R, 128 keys, 128 values]   the state; updated by N tokens
//   out         T [N, H R * 128]
struct DeltaNet {
  const void* inputs;
  const void* gates;
  const void* taps;
  const float* rates;
  const float* offsets;
  const void* norm;
  void* columns;
  float* matrix;
  void* out;
  float eps;
  int key_heads;
  int shared;  // R
};

// Operands of a step.
//   x           T [hidden]          input of the projections, before its norm
//   x_norm      [hidden]            its weight: T, or f32 for kOffset; x_kind, x_eps
//   write, decay   T [H R, hidden]   rows that give b and a
//   heads       f32 [H R * 128]     workspace: outputs of the heads
//   arrived     i32 [H]             workspace: zeros before the first call, which each call leaves
struct DeltaStep : DeltaNet {
  const void* x;
  const void* x_norm;
  const void* write;
  const void* decay;
  float* heads;
  int32_t* arrived;
  float x_eps;
  NormKind x_kind;
  int hidden;
};

void delta_decode(const DeltaStep& step, Type type, int device, cudaStream_t stream);

// Operands of a step of several tokens, of which all but the first are drafted: those of a step, with
//   rows        N: 1 to 8; 0 to replay only
//   stride      elements between rows of inputs, and of gates
//   x           T [N, hidden]
//   heads       f32 [N, H R * 128]
//   columns, matrix   advance by the replayed tokens and the first of this step
// and
//   drafted          rows that the next three have: at least N - 1, at most 7
//   drafted_inputs   T [drafted, C]     those of the drafted tokens before, then of this step
//   drafted_decay, drafted_beta   f32 [drafted, H R]   the same of g and beta
//   row_rates        f32 [N, 2, H R]    workspace: g and beta
//   position         i64 [1]            of the first token of this step
//   first_drafted    i64 [1]            position of the first row of drafted_inputs: rows before `position` are
//   replayed
struct DeltaRows : DeltaStep {
  void* drafted_inputs;
  float* drafted_decay;
  float* drafted_beta;
  float* row_rates;
  const int64_t* position;
  const int64_t* first_drafted;
  int drafted;
  int rows;
  int stride;
};

void delta_verify(const DeltaRows& step, Type type, int device, cudaStream_t stream);

// Operands of a pass.
//   write, decay   T [N, H R]       b and a
//   workspace   bytes [chunks * delta_chunk_bytes(H, R)]
//   tokens      N
//   chunks      of 64 tokens that go through the kernels together
struct DeltaPass : DeltaNet {
  const void* write;
  const void* decay;
  void* workspace;
  int tokens;
  int chunks;
};

void delta_prefill(const DeltaPass& pass, Type type, int device, cudaStream_t stream);

// Bytes of workspace for a chunk; localq/files/delta_memory.py has the same number.
int64_t delta_chunk_bytes(int key_heads, int shared);

}  // namespace localq
