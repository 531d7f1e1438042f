// The launcher of bcq_gemv: checks, and what a launch is made of; vq_cut.h cuts it.
#include "bcq_check.h"
#include "bcq_lookup.cuh"
#include "vq_cut.h"

namespace localq {
namespace bcq {
namespace {

struct BcqKernels {
  static constexpr const char* kOp = bcq::kOp;
  static constexpr bool kFewSlices = true;
  template <typename T, int kRows, typename... Given>
  static void start(const Given&... given) {
    bcq::start<T, kRows>(given...);
  }
};

Arguments arguments_of(const BcqMatrix* matrices, int count, const void* fragments, const GemvExtras& extras) {
  const BcqMatrix& first = matrices[0];
  Arguments p = {};
  p.extras = extras;
  p.parts = extras.activation == Activation::kNone ? 1 : 2;
  p.books = 1, p.in = uint32_t(first.in), p.runs = 1;
  p.slots = p.met = 1;
  p.planes = uint32_t(first.planes), p.layers = p.planes + first.zero_point;
  p.groups = groups(first), p.group_shift = group_shift(first);
  const uint32_t positions = p.in / 8;
  p.book[0] = {8, 3, 1, positions, 0, p.planes * positions * kTile};
  p.unit_columns = kColumns;
  p.slice_units = ceil_div(p.in, kColumns);
  for (int i = 0; i < count; ++i) {
    const BcqMatrix& w = matrices[i];
    const bool second = p.parts == 2 && i == 1;
    Segment& segment = p.segment[i];
    segment.codes[0] = w.codes, segment.group_scales = w.scales;
    segment.fragments[0] = static_cast<const uint4*>(fragments);
    segment.bias = extras.bias[i];
    segment.factor = kFactor;
    segment.out = uint32_t(w.out), segment.tiles = ceil_div(segment.out, kTile);
    segment.y_begin = second ? 0 : p.y_width;
    if (!second) p.units += segment.tiles, p.y_width += segment.out;
  }
  p.run_end[0] = p.units;
  return p;
}

}  // namespace
}  // namespace bcq

void bcq_gemv(const BcqMatrix* matrices, int count, const void* fragments, const GemvExtras& extras,
              const VqWorkspace& workspace, const void* x, void* y, Type type, int rows, int device,
              cudaStream_t stream) {
  using bcq::kOp;
  require(rows >= 1 && rows <= 8, kOp, "rows", rows, "must be from 1 to 8");
  require(count >= 1 && count <= kMaxSegments, kOp, "matrices", count, "must be from 1 to 3");
  require(type != Type::kFloat32, kOp, "dtype", static_cast<int>(type), "must be float16 or bfloat16");
  require_aligned(fragments, 16, kOp, "fragments");
  require_aligned(x, 16, kOp, "x");
  require_aligned(y, extras.y_is_f32 ? 4 : 2, kOp, "y");
  const BcqMatrix& first = matrices[0];
  int64_t total = 0;
  for (int i = 0; i < count; ++i) {
    const BcqMatrix& w = matrices[i];
    bcq::check_matrix(kOp, w);
    require(w.in == first.in, kOp, "in", w.in, "must be that of the first matrix");
    require(w.planes == first.planes && w.zero_point == first.zero_point, kOp, "planes", w.planes,
            "must be those of the first matrix");
    require(w.group == first.group, kOp, "group", w.group, "must be that of the first matrix");
    total += w.out;
  }
  require(total <= 1 << 24, kOp, "out", total, "is too large");
  vq::check_extras(kOp, count, first.out, matrices[count - 1].out, extras, rows);
  const vq::Arguments p = bcq::arguments_of(matrices, count, fragments, extras);
  const DeviceGuard guard(device, kOp);
  if (type == Type::kFloat16) {
    return vq::launch_typed<bcq::BcqKernels>(p, workspace, static_cast<const __half*>(x), y, rows, device, stream);
  }
  vq::launch_typed<bcq::BcqKernels>(p, workspace, static_cast<const __nv_bfloat16*>(x), y, rows, device, stream);
}

}  // namespace localq
