// The products of a mixture of experts with one token, W a sum of codewords (gemv.cu): vq2, AQLM's 1x8 and 2x8.
//   gate_up  y[j] = silu(g) * u, g and u = norm(x) W^T of gate and up of expert chosen[j]      x T [in]
//   down     y = residual + sum over j of weights[j] (x[j] W^T), W of expert chosen[j]         x T [active, in], each
//   of
//            which may be rotated first (rotation.cuh)
//
// Every chosen expert is a product of vq_gemv of its own, and the blocks of a launch are divided among them: first a
// block reads which expert it has, and where that lies (VqPlace), so a graph of a step stays as it is; its arguments
// are then those of an ordinary product, in shared memory. Of gate_up the stripes of all slots lie behind each other.
// Of down the slots are slices of one product: their sums, weighted, meet as slices of columns do (slice_reduce.cuh),
// in the order of `chosen`. So a launch of down needs as many blocks at once as it has slots and slices: active is at
// most the number of multiprocessors.
//
// Every expert has tables of its own, also where experts share codebooks. Deterministic, as vq_gemv. Bound: memory.
// Reads active * out * in / stride bytes of each book once; the first codes are asked for when the choice is there.
#include <algorithm>

#include "lookup/experts_kernel.cuh"
#include "lookup/gemv_plan.h"

namespace localq {
namespace vq {
namespace {

struct Wanted {
  const char* op;
  const VqExperts& experts;
  GemvExtras extras;
  const uint8_t* signs;
  const VqWorkspace& workspace;
  const int32_t* chosen;
  const float* weights;
  int active;
  const void* x;
  void* y;
  int device;
  cudaStream_t stream;
};

void check(const Wanted& l, Type type) {
  const VqMatrix& w = l.experts.like;
  require(type != Type::kFloat32, l.op, "dtype", static_cast<int>(type), "must be float16 or bfloat16");
  require(l.experts.experts >= 1 && l.experts.experts <= 512, l.op, "experts", l.experts.experts, "must be 1 to 512");
  require(l.active >= 1 && l.active <= 16 && l.active <= l.experts.experts, l.op, "active", l.active,
          "must be from 1 to 16, and no more than there are");
  require(w.in >= 8 && w.in % 8 == 0 && w.in <= 1 << 24, l.op, "in", w.in, "must be a positive multiple of 8");
  require(w.out >= 1 && w.out <= 1 << 24, l.op, "out", w.out, "must be positive, at most 2^24");
  require(w.books == 1 || w.books == kMaxBooks, l.op, "books", w.books, "must be 1 or 2");
  for (int b = 0; b < w.books; ++b) check_sizes(l.op, w.book[b], w.in);
  require_aligned(l.experts.places, 8, l.op, "places");
  require_aligned(l.chosen, 4, l.op, "chosen");
  require_aligned(l.x, 16, l.op, "x");
  require_aligned(l.y, 2, l.op, "y");
}

Arguments arguments_of(const Wanted& l, bool down) {
  const VqMatrix& w = l.experts.like;
  Arguments p = {};
  p.extras = l.extras;
  p.parts = down ? 1 : 2;
  p.runs = down || l.experts.shared ? 1 : 2;
  p.scales_bf16 = w.scales_bf16;
  p.rows = 1;
  add_books(p, w);
  add_rotation(l.op, p, l.signs, 1);
  for (uint32_t part = 0; part < p.parts; ++part) {
    p.segment[part].out = uint32_t(w.out), p.segment[part].tiles = ceil_div(uint32_t(w.out), kTile);
  }
  p.units = p.segment[0].tiles, p.y_width = uint32_t(w.out);
  for (uint32_t run = 0; run < p.runs; ++run) p.run_end[run] = p.units;
  p.slots = uint32_t(l.active), p.met = down ? p.slots : 1;
  p.own_bytes = kOwnBytes;
  p.meeting = l.workspace.meeting;
  return p;
}

struct Named {
  static constexpr const char* kOp = "vq_experts";
};

template <typename T, bool kDown>
void launch_typed(const Wanted& l) {
  Arguments p = arguments_of(l, kDown);
  const Cut cut = best_cut<Named, 1>(p, l.workspace, l.device);
  require(cut.stripes != 0, l.op, "in", p.in, "is too large, or there are too many experts, for this device");
  take_cut(p, cut);
  const Chosen c = {l.experts.places, l.chosen, l.weights, uint32_t(l.experts.experts), cut.stripes, p.slices};
  const uint32_t blocks = cut.stripes * p.slices * p.slots;
  if (kDown) p.slices *= p.slots;
  p.inverse = inverse_of(p.slices);
  auto* kernel = vq_experts_kernel<T, kDown, false>;
  if constexpr (kDown) {
    if (l.signs != nullptr) kernel = vq_experts_kernel<T, true, true>;
  }
  launch(l.op, l.device, kernel, blocks, kThreads, cut.shared, l.stream, p, c, static_cast<const T*>(l.x),
         static_cast<T*>(l.y));
}

template <bool kDown>
void launch_any(const Wanted& l, Type type) {
  check(l, type);
  const DeviceGuard guard(l.device, l.op);
  if (type == Type::kFloat16) return launch_typed<__half, kDown>(l);
  launch_typed<__nv_bfloat16, kDown>(l);
}

}  // namespace
}  // namespace vq

void vq_experts_gate_up(const VqExperts& e, const GemvExtras& norm, const VqWorkspace& workspace, const int32_t* chosen,
                        int active, const void* x, void* y, Type type, int device, cudaStream_t stream) {
  GemvExtras extras = {};
  extras.norm = norm.norm, extras.norm_weight = norm.norm_weight, extras.eps = norm.eps;
  extras.activation = Activation::kSilu;
  if (extras.norm != NormKind::kNone) require_aligned(extras.norm_weight, 2, "experts_gate_up", "norm_weight");
  vq::launch_any<false>(
      {"experts_gate_up", e, extras, nullptr, workspace, chosen, nullptr, active, x, y, device, stream}, type);
}

void vq_experts_down(const VqExperts& e, const uint8_t* signs, const VqWorkspace& workspace, const int32_t* chosen,
                     const float* weights, int active, const void* x, const void* residual, void* y, Type type,
                     int device, cudaStream_t stream) {
  GemvExtras extras = {};
  extras.residual = residual;
  require_aligned(weights, 4, "experts_down", "weights");
  vq::launch_any<true>({"experts_down", e, extras, signs, workspace, chosen, weights, active, x, y, device, stream},
                       type);
}

}  // namespace localq
