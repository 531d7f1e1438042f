// vq_gemv: stripes of rows and slices of columns by what they cost, and the kernel for the number of rows
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
constexpr double kWorth = 1.01;                     // times a cost: what less than that is, the estimate cannot tell
constexpr double kItemShare = 0.1;  // of load/store: sums and addresses of an item over the look-ups of a whole one

// For `over_slices`.
inline uint32_t inverse_of(uint32_t slices) {
  return ((1u << 31) + slices - 1) / slices;
}

// Sizes of a book of a matrix with `in` columns.
inline void check_sizes(const char* op, const VqBook& book, int64_t in) {
  const bool power = book.stride == 2 || book.stride == 4 || book.stride == 8 || book.stride == 16;
  require(power && in % book.stride == 0, op, "stride", book.stride, "must be 2, 4, 8 or 16 and divide in");
  require(book.steps == 1 || book.steps == 2, op, "steps", book.steps, "must be 1 or 2");
  const bool within = book.before >= 0 && book.before + in / book.stride <= book.tile_positions;
  require(within && book.tile_positions < 1 << 26, op, "tile_positions", book.tile_positions, "does not fit");
}

// The books of all matrices of a launch, and how columns are cut.
inline void add_books(Arguments& p, const VqMatrix& w) {
  p.books = uint32_t(w.books), p.in = uint32_t(w.in);
  uint32_t widest = 0;
  for (int b = 0; b < w.books; ++b) {
    const VqBook& book = w.book[b];
    uint32_t shift = 1;
    while (1u << shift < book.stride) ++shift;
    p.book[b] = {uint32_t(book.stride), shift,
                 uint32_t(book.steps),  uint32_t(w.in / book.stride),
                 uint32_t(book.before), uint32_t(book.tile_positions) * kTile};
    widest = std::max(widest, p.book[b].stride);
  }
  p.unit_columns = kGroup * widest;
  p.slice_units = ceil_div(p.in, p.unit_columns);
}

struct Cut {
  uint32_t stripes = 0, tables = 0, x_stride = 0, tiles = 0, steps = 0, shared = 0;
  double cycles = 0;      // by positions, as it was measured with tables that are full, or nearly so
  double with_items = 0;  // the same where an item costs its sums too, however few positions it has
};

// The launch with so many slices; no stripes where it does not fit. Kernels: whose it is, by name.
template <typename Kernels, int kRows>
Cut cut_of(const Arguments& p, uint32_t slices, const VqWorkspace& workspace, int device) {
  const DeviceFacts& facts = device_facts(device, Kernels::kOp);
  const uint32_t budget = facts.shared_bytes_per_block, alone = budget / 2 + 1024;  // two of these do not fit
  const uint32_t columns = ceil_div(p.slice_units, slices) * p.unit_columns;
  uint32_t words = 0, made = 0;  // words: positions of all tables, of so many words of 4 bytes
  for (uint32_t b = 0; b < p.books; ++b) {
    words += columns >> p.book[b].shift;
    made += ceil_div(columns >> p.book[b].shift, positions_of_table<kRows>());
  }
  Cut cut;
  cut.x_stride = columns + kReach, cut.steps = made * p.runs + 1;
  const auto shared = [&](uint32_t tables, uint32_t tiles) {
    return p.own_bytes + shared_bytes<kRows>(tables, cut.steps, cut.x_stride, tiles);
  };
  const uint32_t least = shared(1, p.parts);
  if (least > budget) return cut;
  const uint32_t most_units = (budget - least) / (least - shared(1, 0)) + 1;
  const uint32_t sums = slices * p.met, together = slices * p.slots;
  const uint32_t held = std::max(facts.multiprocessors / together, sums == 1 ? 1u : 0u);  // stripes that run at once
  if (held == 0) return cut;
  const uint32_t waves = ceil_div(p.units, held * most_units);
  cut.stripes = std::min(p.units, held * waves);
  cut.tiles = ceil_div(p.units, cut.stripes) * p.parts;
  if (sums > 1 && int64_t(cut.stripes) * together * cut.tiles * kTile * kRows > workspace.words) return Cut{};
  cut.tables = cut.steps > 2 && shared(2, cut.tiles) <= budget ? 2 : 1;
  cut.shared = std::max(alone, shared(cut.tables, cut.tiles));
  const uint32_t items = kRows == 8 ? ceil_div(cut.tiles, 2) : cut.tiles;
  const double rounds = ceil_div(items, kWarps), runs = p.parts == 2 ? p.runs : 1;
  cut.cycles = waves * (rounds * words * kRoundCycles<kRows> + made * runs * kTableCycles);
  if (sums > 1) cut.cycles += kJoinCycles + kGroupCycles * p.parts * ceil_div(sums, kTogether);
  const double counted = (words + kItemShare * made * positions_of_table<kRows>()) / (1 + kItemShare);
  cut.with_items = cut.cycles + waves * rounds * (counted - words) * kRoundCycles<kRows>;
  return cut;
}

// The cheapest; none where nothing fits. Of 1, 2, 4, .., as it was measured, unless another number is worth it: of
// 5,120 columns 10 slices fill a table each, which 8 and 16 cannot.
template <typename Kernels, int kRows>
Cut best_cut(Arguments& p, const VqWorkspace& workspace, int device) {
  Cut best;
  const uint32_t most = std::min(kMostSlices, p.slice_units);
  const auto consider = [&](uint32_t slices, double Cut::* cost, double worth) {
    const Cut cut = cut_of<Kernels, kRows>(p, slices, workspace, device);
    if (cut.stripes == 0 || (best.stripes != 0 && worth * (cut.*cost) >= best.*cost)) return;
    best = cut;
    p.slices = slices;
  };
  for (uint32_t slices = 1; slices <= most; slices *= 2) consider(slices, &Cut::cycles, 1);
  for (uint32_t slices = 3; slices <= most; ++slices) {
    if ((slices & (slices - 1)) != 0) consider(slices, &Cut::with_items, kWorth);
  }
  return best;
}

// Rows of x from `row` on, at most kRows; returns how many, 0 where they do not fit into shared memory.
template <typename Kernels, int kRows, typename T>
int launch_rows(Arguments p, const VqWorkspace& workspace, const T* x, void* y, int row, int rows, int device,
                cudaStream_t stream) {
  const Cut cut = best_cut<Kernels, kRows>(p, workspace, device);
  if (cut.stripes == 0) return 0;
  p.tiles = cut.tiles, p.steps = cut.steps, p.x_stride = cut.x_stride, p.tables = cut.tables;
  p.inverse = inverse_of(p.slices);
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
