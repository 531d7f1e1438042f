// The products of a mixture of experts with one token: gate and up of all chosen experts in one launch, down of all
// with their weighted sum in another (gemv.cuh); experts in MXFP4, NF4 or 16 bits.
//   gate_up  y[j] = gate of norm(x) W^T + bias        W [out, in], bias [out] of expert chosen[j]; x T [in]
//   down     y = residual + sum over j of weights[j] (x[j] W^T + bias)                            x T [active, in]
// Needs in % 64 == 0, with 16 bits in % 8 == 0; out is arbitrary. The chosen experts are read on the device, so a
// captured graph stays valid. One block adds the experts of a result, in their order. Bound: memory. Reads active * out
// * in * (17/32, 0.516 or 2 bytes) once.
#include "experts/experts.h"
#include "experts/gemv_kernel.cuh"

namespace localq {
namespace {

struct Described {
  const char* op;
  const ExpertStack& stack;
  const void *x, *y;
  const void* bias;
  const int32_t* chosen;
  int active;
  Type type;
};

void check_stack(const char* op, const ExpertStack& w) {
  const bool plain = w.format == ExpertFormat::kPlain;
  require(w.experts >= 1 && w.experts <= kMostExperts + 1, op, "experts", w.experts,
          "must be from 1 to 512, and a shared one");
  require(w.out >= 1 && w.in >= 1, op, "out", w.out, "must be positive, like in");
  require(w.in <= 1 << 24 && w.in % (plain ? 8 : 64) == 0, op, "in", w.in,
          "must be a multiple of 64, or of 8 with 16-bit weights");
  require(w.experts * w.out <= 1 << 30 && w.experts * w.out * (w.in / 32) < int64_t(1) << 32, op, "out", w.out,
          "is too large");
  require_aligned(w.codes, 16, op, "codes");
  if (plain) return;
  const bool nested = w.nested_absmax != nullptr;
  require_aligned(w.scales, w.format == ExpertFormat::kMxfp4 ? 2 : nested ? 1 : 4, op, "scales");
  if (w.format == ExpertFormat::kMxfp4) return;
  require_aligned(w.code_map, 4, op, "code_map");
  if (nested) require_aligned(w.nested_absmax, 4, op, "nested_absmax");
  if (nested) require_aligned(w.nested_map, 4, op, "nested_map");
}

void check(const Described& d) {
  check_stack(d.op, d.stack);
  require(d.type != Type::kFloat32, d.op, "dtype", static_cast<int>(d.type), "must be float16 or bfloat16");
  require(d.active >= 1 && d.active <= kMostChosen && d.active <= d.stack.experts, d.op, "active", d.active,
          "must be from 1 to 16 and at most the number of experts");
  require_aligned(d.x, 16, d.op, "x");
  require_aligned(d.y, 2, d.op, "y");
  require_aligned(d.chosen, 4, d.op, "chosen");
}

BlockGemv plan(const Described& d) {
  check(d);
  BlockGemv p = {};
  const ExpertStack& w = d.stack;
  p.matrix[0] = {static_cast<const uint8_t*>(w.codes), static_cast<const uint8_t*>(w.scales), d.bias, uint32_t(w.out)};
  p.in = uint32_t(w.in);
  p.row_bytes = uint32_t(w.format == ExpertFormat::kPlain ? 2 * w.in : w.in / 2);
  p.experts = uint32_t(w.experts);
  p.slots = uint32_t(d.active);
  p.chosen = d.chosen;
  p.code_map = w.code_map;
  p.nested_absmax = w.nested_absmax;
  p.nested_map = w.nested_absmax == nullptr ? nullptr : w.nested_map;
  p.offset = w.offset;
  return p;
}

template <typename T>
void launch_typed(const Described& d, const BlockGemv& p, void* y, int device, cudaStream_t stream) {
  switch (d.stack.format) {
    case ExpertFormat::kMxfp4:
      return launch_mxfp4_blocks(d.op, p, d.x, y, d.type, device, stream);
    case ExpertFormat::kNf4:
      if (p.nested_absmax != nullptr) {
        return launch_block_gemv<Nf4Blocks<T, true>, T>(d.op, p, d.x, y, device, stream);
      }
      return launch_block_gemv<Nf4Blocks<T, false>, T>(d.op, p, d.x, y, device, stream);
    case ExpertFormat::kPlain:
      return launch_block_gemv<PlainBlocks<T>, T>(d.op, p, d.x, y, device, stream);
  }
  require(false, d.op, "format", static_cast<int>(d.stack.format), "is unknown");
}

void launch_any(const Described& d, const BlockGemv& p, void* y, int device, cudaStream_t stream) {
  const DeviceGuard guard(device, d.op);
  if (d.type == Type::kFloat16) return launch_typed<__half>(d, p, y, device, stream);
  launch_typed<__nv_bfloat16>(d, p, y, device, stream);
}

}  // namespace

void experts_gate_up(const ExpertsGateUp& e, Type type, int device, cudaStream_t stream) {
  const Described d = {"experts_gate_up", e.stack, e.x, e.y, e.bias, e.chosen, e.active, type};
  BlockGemv p = plan(d);
  require(e.stack.out % 2 == 0, d.op, "out", e.stack.out, "must be even: half gates, half ups");
  if (e.norm != NormKind::kNone) require_aligned(e.norm_weight, 2, d.op, "norm_weight");
  p.kind = BlockKind::kGateUp;
  p.extras.norm = e.norm, p.extras.norm_weight = e.norm_weight, p.extras.eps = e.eps;
  p.interleaved = e.interleaved, p.clamped = e.gate == Gate::kClamped;
  p.extras.activation = e.gate == Gate::kGeluTanh ? Activation::kGeluTanh : Activation::kSilu;
  p.alpha = e.alpha, p.limit = e.limit;
  p.results = uint32_t(e.stack.out / 2);
  p.slot_units = (p.results + kHalfTile - 1) / kHalfTile;
  p.units = p.slots * p.slot_units;
  p.parts = p.x_rows = 1;
  launch_any(d, p, e.y, device, stream);
}

void experts_down(const ExpertsDown& e, Type type, int device, cudaStream_t stream) {
  const Described d = {"experts_down", e.stack, e.x, e.y, e.bias, e.chosen, e.active, type};
  BlockGemv p = plan(d);
  require_aligned(e.weights, 4, d.op, "weights");
  p.kind = BlockKind::kDown;
  p.weights = e.weights;
  p.extras.residual = e.residual;
  p.early = e.early;
  p.results = uint32_t(e.stack.out);
  p.units = (p.results + kHalfTile - 1) / kHalfTile;
  p.parts = (p.slots + 1) / 2;
  p.x_rows = p.slots;
  launch_any(d, p, e.y, device, stream);
}

}  // namespace localq
