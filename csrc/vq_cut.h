// vq_gemv and bcq_gemv: stripes of rows and slices of columns by what they cost, and the kernel for the number of rows
// of x. Parts of their launchers.
#pragma once

#include <algorithm>

#include "vq_plan.h"

namespace localq::vq {

// What a launch is estimated to cost, in cycles of a multiprocessor, as an H200 took them (README.md).
template <int kRows>
constexpr double kRoundCycles = kRows == 1   ? 13
                                : kRows == 2 ? 14
                                : kRows == 4 ? 28
                                             : 64;  // every warp an item, a position
constexpr double kTableCycles = 1900;               // a table made
constexpr double kJoinCycles = 2500;                // sums of slices joined,
constexpr double kGroupCycles = 700;                // kTogether of them at a time

inline uint32_t ceil_div(uint32_t a, uint32_t b) {
  return (a + b - 1) / b;
}

struct Cut {
  uint32_t stripes = 0, tables = 0, x_stride = 0, tiles = 0, steps = 0, shared = 0, copies = 1;
  double cycles = 0;
};

// The launch with so many slices and copies of sums; no stripes where it does not fit. Kernels: whose it is, by name.
template <typename Kernels, int kRows>
Cut cut_of(const Arguments& p, uint32_t slices, uint32_t copies, const VqWorkspace& workspace, int device) {
  const DeviceFacts& facts = device_facts(device, Kernels::kOp);
  const uint32_t budget = facts.shared_bytes_per_block, alone = budget / 2 + 1024;  // two of these do not fit
  const uint32_t columns = ceil_div(p.slice_units, slices) * p.unit_columns;
  uint32_t words = 0, made = 0;  // words: positions of all tables, of so many words of 4 bytes
  for (uint32_t b = 0; b < p.books; ++b) {
    words += columns >> p.book[b].shift;
    made += ceil_div(columns >> p.book[b].shift, positions_of_table<kRows>());
  }
  Cut cut;
  cut.x_stride = columns + kReach, cut.steps = made * p.runs + 1, cut.copies = copies;
  const auto shared = [&](uint32_t tables, uint32_t tiles) {
    return shared_bytes<kRows>(tables, cut.steps, cut.x_stride, tiles) +
           layer_bytes<kRows>(p, copies, cut.x_stride, tiles);
  };
  const uint32_t least = shared(1, p.parts);
  if (least > budget) return cut;
  const uint32_t most_units = (budget - least) / (least - shared(1, 0)) + 1;
  const uint32_t held = facts.multiprocessors / slices;  // stripes that the device runs at once
  if (held == 0) return cut;
  const uint32_t waves = ceil_div(p.units, held * most_units);
  cut.stripes = std::min(p.units, held * waves);
  cut.tiles = ceil_div(p.units, cut.stripes) * p.parts;
  if (slices > 1 && int64_t(cut.stripes) * slices * cut.tiles * kTile * kRows > workspace.words) return Cut{};
  cut.tables = cut.steps > 2 && shared(2, cut.tiles) <= budget ? 2 : 1;
  cut.shared = std::max(alone, shared(cut.tables, cut.tiles));
  const uint32_t items = kRows == 8 ? ceil_div(cut.tiles, 2) : cut.tiles;
  const double rounds = ceil_div(items * copies, kWarps) * double(p.layers) / copies, runs = p.parts == 2 ? p.runs : 1;
  cut.cycles = waves * (rounds * words * kRoundCycles<kRows> + made * runs * kTableCycles);
  if (slices > 1) cut.cycles += kJoinCycles + kGroupCycles * p.parts * ceil_div(slices, kTogether);
  return cut;
}

// The cheapest; none where nothing fits. Of 1, 2, 4, .. slices, or where they are few and long, of any number.
template <typename Kernels, int kRows>
Cut best_cut(Arguments& p, const VqWorkspace& workspace, int device) {
  Cut best;
  const uint32_t most = std::min(kMostSlices, p.slice_units);
  for (uint32_t slices = 1; slices <= most; slices = Kernels::kFewSlices ? slices + 1 : 2 * slices) {
    for (const uint32_t copies : {1u, p.layers}) {
      const Cut cut = cut_of<Kernels, kRows>(p, slices, copies, workspace, device);
      if (cut.stripes == 0 || (best.stripes != 0 && cut.cycles >= best.cycles)) continue;
      best = cut;
      p.slices = slices;
    }
  }
  return best;
}

// Rows of x from `row` on, at most kRows; returns how many, 0 where they do not fit into shared memory.
template <typename Kernels, int kRows, typename T>
int launch_rows(Arguments p, const VqWorkspace& workspace, const T* x, void* y, int row, int rows, int device,
                cudaStream_t stream) {
  const Cut cut = best_cut<Kernels, kRows>(p, workspace, device);
  if (cut.stripes == 0) return 0;
  p.tiles = cut.tiles, p.steps = cut.steps, p.x_stride = cut.x_stride, p.tables = cut.tables, p.copies = cut.copies;
  p.stripe_share = {p.units / cut.stripes, p.units % cut.stripes};
  p.slice_share = {p.slice_units / p.slices, p.slice_units % p.slices};
  p.meeting = workspace.meeting;
  p.rows = std::min(kRows, rows - row);
  const uint64_t skipped = uint64_t(row) * p.y_width;
  if (p.extras.residual != nullptr) p.extras.residual = static_cast<const T*>(p.extras.residual) + skipped;
  void* const to = static_cast<uint8_t*>(y) + skipped * (p.extras.y_is_f32 ? sizeof(float) : sizeof(T));
  const Plan plan = {cut.stripes * p.slices, cut.shared};
  Kernels::template start<T, kRows>(p, plan, x + uint64_t(row) * p.in, to, device, stream);
  return p.rows;
}

// All rows, in as few launches as fit: a table of 8 rows needs the most shared memory for x and for sums.
template <typename Kernels, typename T>
void launch_typed(const Arguments& p, const VqWorkspace& workspace, const T* x, void* y, int rows, int device,
                  cudaStream_t stream) {
  for (int row = 0; row < rows;) {
    int done = 0;
    if (rows - row > 4) done = launch_rows<Kernels, 8>(p, workspace, x, y, row, rows, device, stream);
    if (done == 0 && rows - row > 2) done = launch_rows<Kernels, 4>(p, workspace, x, y, row, rows, device, stream);
    if (done == 0 && rows - row > 1) done = launch_rows<Kernels, 2>(p, workspace, x, y, row, rows, device, stream);
    if (done == 0) done = launch_rows<Kernels, 1>(p, workspace, x, y, row, rows, device, stream);
    require(done != 0, Kernels::kOp, "in", p.in, "is too large for the shared memory of this device");
    row += done;
  }
}

// `first` and `second`: rows of the first two matrices.
inline void check_extras(const char* op, int count, int64_t first, int64_t second, const GemvExtras& extras, int rows) {
  if (extras.activation != Activation::kNone) {
    require(count == 2, op, "matrices", count, "must be 2 with an activation");
    require(first == second, op, "out", second, "must be that of the first matrix");
    require(extras.residual == nullptr, op, "residual", 1, "must be null with an activation");
  }
  if (extras.norm == NormKind::kNone) return;
  require(rows == 1, op, "rows", rows, "must be 1 with a norm");
  require_aligned(extras.norm_weight, 2, op, "norm_weight");
}

}  // namespace localq::vq
