// Launch geometry of vq_gemv: the split into stripes of rows and slices of columns with the least estimated cost, and
// the choice of the kernel by the number of rows. Also used by the launchers of experts.cu and bcq/.
#pragma once

#include <algorithm>

#include "common/check_gemv.h"
#include "lookup/gemv_launch.h"
#include "lookup/hadamard.h"

namespace localq::vq {

// Estimated costs in cycles of a multiprocessor, measured on an H200 (README.md); for 4 and 8 rows measured with one
// table per step.
template <int kRows>
constexpr double kRoundCycles = kRows == 1   ? 13
                                : kRows == 2 ? 14
                                : kRows == 4 ? 28
                                             : 64;  // per item of every warp, and position
constexpr double kTableCycles = 1900;               // to build a table
constexpr double kJoinCycles = 2500;                // to add the sums of slices,
constexpr double kGroupCycles = 700;                // per kTogether slices
constexpr double kWorth = 1.01;                     // costs within this factor count as equal
constexpr double kItemShare = 0.1;  // sums and addresses of an item, relative to the look-ups of a whole one

// The factor of `over_slices`.
inline uint32_t inverse_of(uint32_t slices) {
  return ((1u << 31) + slices - 1) / slices;
}

// Checks the sizes of a book of a matrix with `in` columns.
inline void check_sizes(const char* op, const VqBook& book, int64_t in) {
  const bool power = book.stride == 2 || book.stride == 4 || book.stride == 8 || book.stride == 16;
  require(power && in % book.stride == 0, op, "stride", book.stride, "must be 2, 4, 8 or 16 and divide in");
  require(book.steps == 1 || book.steps == 2, op, "steps", book.steps, "must be 1 or 2");
  const bool within = book.before >= 0 && book.before + in / book.stride <= book.tile_positions;
  require(within && book.tile_positions < 1 << 26, op, "tile_positions", book.tile_positions,
          "must be below 2^26, and at least before + in / stride");
}

// The books of all matrices of a launch.
inline void add_books(Arguments& p, const VqMatrix& w) {
  p.books = uint32_t(w.books), p.in = uint32_t(w.in);
  for (int b = 0; b < w.books; ++b) {
    const VqBook& book = w.book[b];
    uint32_t shift = 1;
    while (1u << shift < book.stride) ++shift;
    p.book[b] = {uint32_t(book.stride), shift,
                 uint32_t(book.steps),  uint32_t(w.in / book.stride),
                 uint32_t(book.before), uint32_t(book.tile_positions) * kTile};
  }
}

// The rotation of x, if there are signs. Call after add_books.
inline void add_rotation(const char* op, Arguments& p, const uint8_t* signs, int rows) {
  if (signs == nullptr) return;
  require(rows == 1, op, "rows", rows, "must be 1 with signs");
  require(p.in % 16 == 0, op, "in", p.in, "must be a multiple of 16 with signs");
  require_aligned(signs, 1, op, "signs");
  uint32_t reach = 0;
  for (uint32_t b = 0; b < p.books; ++b) reach = std::max(reach, 16 * p.book[b].steps - p.book[b].stride);
  const uint32_t block = hadamard_block(p.in);
  p.rotation = {signs, block, (reach + 7) / 8 * 8, hadamard_scale(block)};
}

// A split of the columns: the fields of Arguments, and the maxima per block.
struct Columns {
  uint32_t slices = 0, apart = 0, unit[kMaxBooks] = {};
  Shares share[kMaxBooks] = {};
  uint32_t columns = 0, positions = 0, tables = 0;  // positions: of all its tables
  bool pairs = false;                               // a book has more than one table
};

// Splits the columns of books first .. end - 1 into `slices` slices; false if those are too many.
inline bool cut_books(const Arguments& p, uint32_t first, uint32_t end, uint32_t slices, uint32_t table, Columns& cut) {
  uint32_t unit = 0, positions = 0, tables = 0;
  for (uint32_t b = first; b < end; ++b) unit = std::max(unit, kGroup * p.book[b].stride);
  const uint32_t units = ceil_div(p.in, unit), columns = slices == 0 ? 0 : ceil_div(units, slices) * unit;
  if (slices == 0 || slices > units) return false;
  for (uint32_t b = first; b < end; ++b) {
    positions += columns >> p.book[b].shift;
    tables += ceil_div(columns >> p.book[b].shift, table);
    cut.pairs = cut.pairs || columns >> p.book[b].shift > table;
  }
  cut.unit[first] = unit, cut.share[first] = {units / slices, units % slices};
  cut.columns = std::max(cut.columns, columns), cut.positions = std::max(cut.positions, positions);
  cut.tables = std::max(cut.tables, tables);
  return true;
}

// Columns in so many slices, each with all books or with only one (`apart`): a book gets slices in proportion to its
// positions. No slices if that is impossible.
inline Columns columns_of(const Arguments& p, uint32_t slices, bool apart, uint32_t table) {
  Columns cut;
  if (!apart) {
    if (cut_books(p, 0, p.books, slices, table, cut)) cut.slices = slices;
    return cut;
  }
  if (p.books != 2) return cut;
  const uint32_t first = p.book[0].positions, all = first + p.book[1].positions;
  cut.apart = uint32_t((uint64_t(slices) * first + all / 2) / all);
  const bool whole = cut_books(p, 0, 1, cut.apart, table, cut) && cut_books(p, 1, 2, slices - cut.apart, table, cut);
  if (whole) cut.slices = slices;
  return cut;
}

struct Cut {
  uint32_t stripes = 0, tables = 0, step_tables = 0, tiles = 0, steps = 0, shared = 0;
  Columns columns;
  double cycles = 0;      // by positions, as measured with full or nearly full tables
  double with_items = 0;  // the same, with a fixed cost per item in addition
};

// The launch with this split of the columns; no stripes if it does not fit. Kernels: the kernels, by name.
template <typename Kernels, int kRows>
Cut cut_of(const Arguments& p, const Columns& columns, const VqWorkspace& workspace, int device) {
  const DeviceFacts& facts = device_facts(device, Kernels::kOp);
  const uint32_t budget = facts.shared_bytes_per_block, alone = budget / 2 + 1024;  // two blocks do not fit
  Cut cut;
  if (columns.slices == 0) return cut;
  cut.columns = columns, cut.steps = columns.tables * p.runs + 1;
  const auto shared = [&](uint32_t tables, uint32_t tiles) {
    return p.own_bytes + shared_bytes<kRows>(tables, cut.steps, columns.columns + kReach, tiles);
  };
  const uint32_t least = shared(1, p.parts);
  if (least > budget) return cut;
  const uint32_t most_units = (budget - least) / (least - shared(1, 0)) + 1;
  const uint32_t sums = columns.slices * p.met, together = columns.slices * p.slots;
  const uint32_t held = std::max(facts.multiprocessors / together, sums == 1 ? 1u : 0u);  // resident stripes
  if (held == 0) return cut;
  const uint32_t waves = ceil_div(p.units, held * most_units);
  cut.stripes = std::min(p.units, held * waves);
  cut.tiles = ceil_div(p.units, cut.stripes) * p.parts;
  if (sums > 1 && int64_t(cut.stripes) * together * cut.tiles * kTile * kRows > workspace.words) return Cut{};
  cut.tables = cut.steps > 2 && shared(2, cut.tiles) <= budget ? 2 : 1;
  cut.step_tables = kPairs<kRows> && columns.pairs ? cut.tables : 1;
  cut.shared = std::max(alone, shared(cut.tables, cut.tiles));
  const uint32_t items = kRows == 8 ? ceil_div(cut.tiles, 2) : cut.tiles;
  const double rounds = ceil_div(items, kWarps), runs = p.parts == 2 ? p.runs : 1, words = columns.positions;
  cut.cycles = waves * (rounds * words * kRoundCycles<kRows> + columns.tables * runs * kTableCycles);
  if (sums > 1) cut.cycles += kJoinCycles + kGroupCycles * p.parts * ceil_div(sums, kTogether);
  const double counted = (words + kItemShare * columns.tables * positions_of_table<kRows>()) / (1 + kItemShare);
  cut.with_items = cut.cycles + waves * rounds * (counted - words) * kRoundCycles<kRows>;
  return cut;
}

// The cheapest split; none if nothing fits. Slice counts are 1, 2, 4, .., for which costs are measured, unless another
// is worth it: of 5,120 columns 10 slices fill a table each, which 8 and 16 cannot.
template <typename Kernels, int kRows>
Cut best_cut(const Arguments& p, const VqWorkspace& workspace, int device) {
  Cut best;
  const auto consider = [&](uint32_t slices, double Cut::* cost, double worth) {
    for (const bool apart : {false, true}) {
      const Columns columns = columns_of(p, slices, apart, positions_of_table<kRows>());
      const Cut cut = cut_of<Kernels, kRows>(p, columns, workspace, device);
      if (cut.stripes != 0 && (best.stripes == 0 || worth * (cut.*cost) < best.*cost)) best = cut;
    }
  };
  for (uint32_t slices = 1; slices <= kMostSlices; slices *= 2) consider(slices, &Cut::cycles, 1);
  for (uint32_t slices = 3; slices <= kMostSlices; ++slices) {
    if ((slices & (slices - 1)) != 0) consider(slices, &Cut::with_items, kWorth);
  }
  return best;
}

inline void take_cut(Arguments& p, const Cut& cut) {
  const Columns& columns = cut.columns;
  p.tiles = cut.tiles, p.steps = cut.steps, p.x_stride = columns.columns + kReach, p.tables = cut.tables;
  p.step_tables = cut.step_tables;
  p.slices = columns.slices, p.apart = columns.apart;
  p.inverse = inverse_of(p.slices);
  p.stripe_share = {p.units / cut.stripes, p.units % cut.stripes};
  for (uint32_t b = 0; b < kMaxBooks; ++b) {
    p.slice_share[b] = columns.share[b], p.unit_columns[b] = columns.unit[b];
  }
}

// At most kRows rows of x, from row `row`; returns their number, 0 if they do not fit into shared memory.
template <typename Kernels, int kRows, typename T>
int launch_rows(Arguments p, const VqWorkspace& workspace, const T* x, void* y, int row, int rows, int device,
                cudaStream_t stream) {
  const Cut cut = best_cut<Kernels, kRows>(p, workspace, device);
  if (cut.stripes == 0) return 0;
  take_cut(p, cut);
  p.meeting = workspace.meeting;
  p.rows = std::min(kRows, rows - row);
  const uint64_t skipped = uint64_t(row) * p.y_width;
  if (p.extras.residual != nullptr) p.extras.residual = static_cast<const T*>(p.extras.residual) + skipped;
  void* const to = static_cast<uint8_t*>(y) + skipped * (p.extras.y_is_f32 ? sizeof(float) : sizeof(T));
  const Plan plan = {cut.stripes * p.slices, cut.shared};
  Kernels::template start<T, kRows>(p, plan, x + uint64_t(row) * p.in, to, device, stream);
  return p.rows;
}

// All rows, in as few launches as fit: a table for 8 rows needs the most shared memory for x and for sums.
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

}  // namespace localq::vq
