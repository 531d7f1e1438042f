// Launcher of bcq_gemv: checks and arguments; gemv_plan.h plans the launch.
#include "bcq/check.h"
#include "bcq/gemv_plan.h"
#include "common/launch.h"
#include "lookup/gemv_plan.h"

namespace localq {
namespace bcq {
namespace {

Arguments arguments_of(const BcqMatrix* matrices, int count, const GemvExtras& extras) {
  const BcqMatrix& first = matrices[0];
  Arguments p = {};
  p.extras = extras;
  p.parts = extras.activation == Activation::kNone ? 1 : 2;
  p.in = uint32_t(first.in), p.runs = 1;
  p.slots = p.met = p.slices = 1, p.inverse = vq::inverse_of(1);
  p.planes = uint32_t(first.planes), p.layers = p.planes + first.zero_point;
  p.groups = groups(first);
  p.columns = ceil_div(p.in, kColumns);
  p.tile_codes = p.planes * p.columns * kUnitBytes, p.tile_scales = p.layers * p.groups * kScaleBytes;
  const uint32_t shift = group_shift(first);  // in eights: 4 per word, 16 per block
  p.word_shift = shift < 4 ? shift - 2 : 31;
  p.block_shift = shift == 31 ? 31 : shift < 4 ? 0 : shift - 4;
  for (int i = 0; i < count; ++i) {
    const BcqMatrix& w = matrices[i];
    const bool second = p.parts == 2 && i == 1;
    vq::Segment& segment = p.segment[i];
    segment.codes[0] = w.codes, segment.group_scales = w.scales;
    segment.bias = extras.bias[i];
    segment.out = uint32_t(w.out), segment.tiles = ceil_div(segment.out, kTile);
    segment.y_begin = second ? 0 : p.y_width;
    if (!second) p.units += segment.tiles, p.y_width += segment.out;
  }
  p.run_end[0] = p.units;
  return p;
}

// At most kRows rows of x, from row `row`; returns their number, 0 if they do not fit into shared memory.
template <int kRows, typename T>
int launch_rows(Arguments p, const T* x, void* y, int row, int rows, int device, cudaStream_t stream) {
  const DeviceFacts& facts = device_facts(device, kOp);
  const uint32_t budget = facts.shared_bytes_per_block;
  Plan plan = plan_of<kRows>(p, facts.multiprocessors, budget);
  if (plan.blocks == 0 || (kRows > 1 && p.chunk < std::min(p.columns, kLeastChunk))) return 0;
  plan.shared_bytes = std::max(plan.shared_bytes, budget / 2 + 1024);  // two blocks do not fit
  p.stripe_share = {p.units / plan.blocks, p.units % plan.blocks};
  p.rows = std::min(kRows, rows - row);
  const uint64_t skipped = uint64_t(row) * p.y_width;
  if (p.extras.residual != nullptr) p.extras.residual = static_cast<const T*>(p.extras.residual) + skipped;
  void* const to = static_cast<uint8_t*>(y) + skipped * (p.extras.y_is_f32 ? sizeof(float) : sizeof(T));
  start<T, kRows>(p, plan, x + uint64_t(row) * p.in, to, device, stream);
  return p.rows;
}

// All rows, in as few launches as fit.
template <typename T>
void launch_typed(const Arguments& p, const void* x, void* y, int rows, int device, cudaStream_t stream) {
  const T* const from = static_cast<const T*>(x);
  for (int row = 0; row < rows;) {
    int done = 0;
    if (rows - row > 4) done = launch_rows<8>(p, from, y, row, rows, device, stream);
    if (done == 0 && rows - row > 2) done = launch_rows<4>(p, from, y, row, rows, device, stream);
    if (done == 0 && rows - row > 1) done = launch_rows<2>(p, from, y, row, rows, device, stream);
    if (done == 0) done = launch_rows<1>(p, from, y, row, rows, device, stream);
    require(done != 0, kOp, "out", p.y_width, "needs more shared memory than this device has");
    row += done;
  }
}

}  // namespace
}  // namespace bcq

void bcq_gemv(const BcqMatrix* matrices, int count, const GemvExtras& extras, const void* x, void* y, Type type,
              int rows, int device, cudaStream_t stream) {
  using bcq::kOp;
  require(rows >= 1 && rows <= 8, kOp, "rows", rows, "must be from 1 to 8");
  require(count >= 1 && count <= kMaxSegments, kOp, "matrices", count, "must be from 1 to 3");
  require(type != Type::kFloat32, kOp, "dtype", static_cast<int>(type), "must be float16 or bfloat16");
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
  check_extras(kOp, count, first.out, matrices[count - 1].out, extras, rows);
  const bcq::Arguments p = bcq::arguments_of(matrices, count, extras);
  const DeviceGuard guard(device, kOp);
  if (type == Type::kFloat16) return bcq::launch_typed<__half>(p, x, y, rows, device, stream);
  bcq::launch_typed<__nv_bfloat16>(p, x, y, rows, device, stream);
}

}  // namespace localq
