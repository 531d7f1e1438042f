// Mixtures of experts in GGUF blocks for one token: host API. Router and choice: experts/experts.h.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/gemv.h"
#include "common/types.h"
#include "gguf/gguf.h"

namespace localq {

// The experts of a layer: gate and up of each, or one matrix of each, [out, in]. All gates are of one block type, and
// so are all ups.
//   blocks   u64 [experts, parts], on the device: addresses of blocks in tiled order (layout.cuh), 16-byte aligned
//   factors  f32 [experts, parts], on the device, or null: multiply the weights; of NVFP4 only
struct GgufStack {
  const uint64_t* blocks;
  const float* factors;
  int64_t experts, parts, out, in;
};

// y T [active, out] = activation(gate) * up of norm(x) for the experts chosen[j]; 2 parts. An index outside is clamped.
// Two launches, with the gates in f32 between them, if gates and ups are of two block types.
struct GgufExpertsGateUp {
  GgufStack stack;
  const void* x;  // T [in]
  NormKind norm;
  const void* norm_weight;
  float eps;
  const int32_t* chosen;
  int active;
  Activation activation;
  float* gates;  // f32 [active, out], written over; null for one block type
  void* y;
};
void gguf_experts_gate_up(const GgufExpertsGateUp& e, GgufType gate, GgufType up, Type type, int device,
                          cudaStream_t stream);

// y T [out] = residual + sum over j of weights[j] x[j] W^T, W of expert chosen[j]; 1 part.
struct GgufExpertsDown {
  GgufStack stack;
  const void* x;  // T [active, in]
  const int32_t* chosen;
  const float* weights;
  int active;
  const void* residual;  // T [out] or null; can be y
  bool early;            // the preceding launch is gguf_experts_gate_up, and `chosen` is older than it
  void* y;
};
void gguf_experts_down(const GgufExpertsDown& e, GgufType of, Type type, int device, cudaStream_t stream);

}  // namespace localq
