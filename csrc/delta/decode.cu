// One token through a gated delta net, in one launch: convolution, silu, the rule, norm and gate.
//
//   q, k, v = silu(conv(inputs));  q, k of length 1;  q / sqrt(128);  b, a = norm(x) W^T
//   beta = sigmoid(b);  g = -exp(A_log) softplus(a + dt_bias)
//   S = exp(g) S;  S += k (beta (v - S^T k))^T;  o = S^T q;  out = norm(o) * weight * silu(z)
//
// The recurrence, b, a and beta in f32; q, k, v, o and the norm are rounded to T where transformers rounds them
// (models/qwen3_5/modeling_qwen3_5.py). S is read and written once: o = exp(g) S^T q + written (k q) needs the old S.
// Grid: a block per 32 values of a value head, so that 27B has 192 blocks, of 8 warps with 16 keys each; a lane has a
// value. The last block of a key head norms its value heads, a warp each, and moves the columns of the convolution on,
// which the others read. Sums have a fixed order: deterministic. Bound: memory, 128 KiB per value head.
//
// b and a have no launch of their own: each block of a head multiplies its two rows, which stay in L2 for the others.
// Before the dependency wait the state and these rows are loaded: no launch writes the rows, and the state was written
// by the step before this one, which has ended.
#include "delta/check.h"
#include "delta/decode_kernel.cuh"

namespace localq {

namespace {

constexpr const char* kOp = "delta_decode";

template <typename T>
void start(const DeltaStep& step, int device, cudaStream_t stream) {
  const unsigned blocks = unsigned(step.key_heads) * step.shared * delta::kSlices;
  launch(kOp, device, delta::delta_decode_kernel<T>, dim3(blocks), dim3(delta::kThreads), 0, stream, step);
}

}  // namespace

void delta_decode(const DeltaStep& step, Type type, int device, cudaStream_t stream) {
  delta::check_net(step, type, kOp);
  delta::check_step(step, kOp);
  const DeviceGuard guard(device, kOp);
  if (type == Type::kFloat16) return start<__half>(step, device, stream);
  start<__nv_bfloat16>(step, device, stream);
}

}  // namespace localq
