// The norm and the gate of what heads have read (prefill.cu).
#pragma once

#include "delta/tiles.cuh"

namespace localq::delta {

constexpr int kGateThreads = 256;

// A head of a token for each warp, in place.
template <typename T>
__global__ void __launch_bounds__(kGateThreads) delta_gate_kernel(const DeltaPass pass) {
  release_dependents();
  const int64_t head = int64_t(blockIdx.x) * (kGateThreads / 32) + threadIdx.x / 32;
  const int64_t all = int64_t(pass.tokens) * pass.key_heads * pass.shared;
  const int lane = threadIdx.x % 32;
  if (head >= all) return;
  using Four = Run<T, 4>;
  const Four weight = static_cast<const Four*>(pass.norm)[lane];
  dependency_wait();
  const int64_t at = head * 32 + lane;
  Four out = static_cast<const Four*>(pass.out)[at];
  const Four gates = static_cast<const Four*>(pass.gates)[at];
  float x[4], squares = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = to_float(out.value[i]);
    squares = fmaf(x[i], x[i], squares);
  }
  const float scale = rsqrtf(warp_sum(squares) / kDeltaDim + pass.eps);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float normed = rounded<T>(rounded<T>(x[i] * scale) * to_float(weight.value[i]));
    const float z = to_float(gates.value[i]);
    round_to(normed * (z * sigmoid(z)), out.value[i]);
  }
  static_cast<Four*>(pass.out)[at] = out;
}

}  // namespace localq::delta
