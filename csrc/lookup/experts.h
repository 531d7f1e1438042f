// Mixtures of experts whose matrices are sums of codewords (experts.cu): what is offered.
#pragma once

#include "lookup/gemv.h"

namespace localq {

// What differs between matrices [out, in] that one launch chooses among, as it lies on the device: where a matrix is.
//   codes, fragments, scales, factor   as of VqBook and VqMatrix
struct VqPlace {
  const uint8_t* codes[kMaxBooks];
  const void* fragments[kMaxBooks];
  const void* scales;
  float factor;
  uint32_t unused;
};

// The experts of a layer.
//   like    a matrix of theirs: sizes, books, type of scales; its addresses are not read
//   places  [experts][1], or [experts][2] of gate and up
//   shared  gate and up of every expert have the same fragments
struct VqExperts {
  VqMatrix like;
  const VqPlace* places;
  int64_t experts;
  bool shared;
};

// y T [active, out] = silu(gate) * up of norm(x) T [in], of the experts chosen[j] i32 [active].
void vq_experts_gate_up(const VqExperts& e, const GemvExtras& norm, const VqWorkspace& workspace, const int32_t* chosen,
                        int active, const void* x, void* y, Type type, int device, cudaStream_t stream);

// y T [out] = residual + sum over j of weights[j] * (x[j] W^T), x T [active, in], W of the expert chosen[j], weights
// f32 [active]; residual T [out] or null, which may be y. With signs u8 [in / 8] each x[j] is rotated first.
void vq_experts_down(const VqExperts& e, const uint8_t* signs, const VqWorkspace& workspace, const int32_t* chosen,
                     const float* weights, int active, const void* x, const void* residual, void* y, Type type,
                     int device, cudaStream_t stream);

}  // namespace localq
