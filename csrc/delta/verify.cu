// Several tokens through a gated delta net, of which all but the first are drafted and may be rejected; in one launch.
//
// Equation, rounding and order of sums of each token as of delta_decode (decode.cu). A step before may have left
// drafted tokens: those that were accepted, position - first_drafted of them, are replayed first. The state and the
// columns written are those behind the first token of this step; the inputs of the others are kept for the next launch.
// With 0 tokens the launch replays only.
//
// Grid as of delta_decode. A block keeps its part of the state in registers along all tokens, one barrier each. Before
// the dependency wait it also loads the position and replays the convolution: the step before has written both. What
// other blocks of the key head read at their start (columns, kept inputs and rates) is written by the last of them.
// Bound: memory, as of delta_decode: the state is read and written once, whatever the number of tokens.
#include "delta/check.h"
#include "delta/verify_kernel.cuh"

namespace localq {

namespace {

constexpr const char* kOp = "delta_verify";

template <typename T>
void start(const DeltaRows& step, int device, cudaStream_t stream) {
  const unsigned blocks = unsigned(step.key_heads) * step.shared * delta::kSlices;
  launch(kOp, device, delta::delta_verify_kernel<T>, dim3(blocks), dim3(delta::kThreads), 0, stream, step);
}

void check_kept(const DeltaRows& step) {
  const int most = kMostDeltaRows;
  require(step.rows >= 0 && step.rows <= most, kOp, "rows", step.rows, "must be from 0 to 8");
  require(step.drafted >= step.rows - 1 && step.drafted < most, kOp, "drafted", step.drafted,
          "must be at least rows - 1, and at most 7");
  require_aligned(step.position, 8, kOp, "position");
  require_aligned(step.first_drafted, 8, kOp, "first_drafted");
  require_aligned(step.drafted_inputs, 2, kOp, "drafted_inputs");
  require_aligned(step.drafted_decay, 4, kOp, "drafted_decay");
  require_aligned(step.drafted_beta, 4, kOp, "drafted_beta");
}

}  // namespace

void delta_verify(const DeltaRows& step, Type type, int device, cudaStream_t stream) {
  delta::check_net(step, type, kOp);
  check_kept(step);
  if (step.rows > 0) {
    delta::check_step(step, kOp);
    require_aligned(step.row_rates, 4, kOp, "row_rates");
  }
  require_aligned(step.columns, 2, kOp, "columns");
  require_aligned(step.matrix, 16, kOp, "matrix");
  require_aligned(step.arrived, 4, kOp, "arrived");
  const DeviceGuard guard(device, kOp);
  if (type == Type::kFloat16) return start<__half>(step, device, stream);
  start<__nv_bfloat16>(step, device, stream);
}

}  // namespace localq
