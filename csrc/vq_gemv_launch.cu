// The launcher of vq_gemv: checks, cuts a launch into stripes of rows and slices of columns, and takes the kernel for
// the number of rows of x.
#include <algorithm>

#include "vq_plan.h"

namespace localq {
namespace vq {
namespace {

// What a launch is estimated to cost, in cycles of a multiprocessor, as an H200 took them (README.md).
template <int kRows>
constexpr double kRoundCycles = kRows == 1   ? 13
                                : kRows == 2 ? 14
                                : kRows == 4 ? 28
                                             : 64;  // every warp an item, a position
constexpr double kTableCycles = 1900;               // a table made
constexpr double kJoinCycles = 2500;                // sums of slices joined,
constexpr double kGroupCycles = 700;                // kTogether of them at a time

uint32_t ceil_div(uint32_t a, uint32_t b) {
  return (a + b - 1) / b;
}

struct Cut {
  uint32_t stripes = 0, tables = 0, x_stride = 0, tiles = 0, steps = 0, shared = 0;
  double cycles = 0;
};

// The launch with so many slices; no stripes where it does not fit.
template <int kRows>
Cut cut_of(const Arguments& p, uint32_t slices, const VqWorkspace& workspace, int device) {
  const DeviceFacts& facts = device_facts(device, kOp);
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
    return shared_bytes<kRows>(tables, cut.steps, cut.x_stride, tiles);
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
  const double rounds = ceil_div(cut.tiles, kWarps * (kRows == 8 ? 2 : 1)), runs = p.parts == 2 ? p.runs : 1;
  cut.cycles = waves * (rounds * words * kRoundCycles<kRows> + made * runs * kTableCycles);
  if (slices > 1) cut.cycles += kJoinCycles + kGroupCycles * p.parts * ceil_div(slices, kTogether);
  return cut;
}

// The cheapest of 1, 2, 4, .. slices; none where nothing fits.
template <int kRows>
Cut best_cut(Arguments& p, const VqWorkspace& workspace, int device) {
  Cut best;
  for (uint32_t slices = 1; slices <= std::min(kMostSlices, p.slice_units); slices *= 2) {
    const Cut cut = cut_of<kRows>(p, slices, workspace, device);
    if (cut.stripes == 0 || (best.stripes != 0 && cut.cycles >= best.cycles)) continue;
    best = cut;
    p.slices = slices;
  }
  return best;
}

// Rows of x from `row` on, at most kRows; returns how many, 0 where they do not fit into shared memory.
template <typename T, int kRows>
int launch_rows(Arguments p, const VqWorkspace& workspace, const T* x, void* y, int row, int rows, int device,
                cudaStream_t stream) {
  const Cut cut = best_cut<kRows>(p, workspace, device);
  if (cut.stripes == 0) return 0;
  p.tiles = cut.tiles, p.steps = cut.steps, p.x_stride = cut.x_stride, p.tables = cut.tables;
  while (1u << p.slice_shift < p.slices) ++p.slice_shift;
  p.stripe_share = {p.units / cut.stripes, p.units % cut.stripes};
  p.slice_share = {p.slice_units / p.slices, p.slice_units % p.slices};
  p.meeting = workspace.meeting;
  p.rows = std::min(kRows, rows - row);
  const uint64_t skipped = uint64_t(row) * p.y_width;
  if (p.extras.residual != nullptr) p.extras.residual = static_cast<const T*>(p.extras.residual) + skipped;
  void* const to = static_cast<uint8_t*>(y) + skipped * (p.extras.y_is_f32 ? sizeof(float) : sizeof(T));
  start<T, kRows>(p, {cut.stripes * p.slices, cut.shared}, x + uint64_t(row) * p.in, to, device, stream);
  return p.rows;
}

// All rows, in as few launches as fit: a table of 8 rows needs the most shared memory for x and for sums.
template <typename T>
void launch_typed(const Arguments& p, const VqWorkspace& workspace, const T* x, void* y, int rows, int device,
                  cudaStream_t stream) {
  for (int row = 0; row < rows;) {
    int done = 0;
    if (rows - row > 4) done = launch_rows<T, 8>(p, workspace, x, y, row, rows, device, stream);
    if (done == 0 && rows - row > 2) done = launch_rows<T, 4>(p, workspace, x, y, row, rows, device, stream);
    if (done == 0 && rows - row > 1) done = launch_rows<T, 2>(p, workspace, x, y, row, rows, device, stream);
    if (done == 0) done = launch_rows<T, 1>(p, workspace, x, y, row, rows, device, stream);
    require(done != 0, kOp, "in", p.in, "is too large for the shared memory of this device");
    row += done;
  }
}

void check_matrix(const VqMatrix& w, const VqMatrix& first) {
  require(w.out >= 1, kOp, "out", w.out, "must be positive");
  require(w.in == first.in, kOp, "in", w.in, "must be that of the first matrix");
  require(w.books == first.books, kOp, "books", w.books, "must be those of the first matrix");
  require(w.scales_bf16 == first.scales_bf16, kOp, "scales_bf16", w.scales_bf16, "must be that of the first matrix");
  require_aligned(w.scales, 2, kOp, "scales");
  for (int b = 0; b < w.books; ++b) {
    const VqBook& book = w.book[b];
    const bool power = book.stride == 2 || book.stride == 4 || book.stride == 8 || book.stride == 16;
    require(power && w.in % book.stride == 0, kOp, "stride", book.stride, "must be 2, 4, 8 or 16 and divide in");
    require(book.steps == 1 || book.steps == 2, kOp, "steps", book.steps, "must be 1 or 2");
    const bool within = book.before >= 0 && book.before + w.in / book.stride <= book.tile_positions;
    require(within && book.tile_positions < 1 << 26, kOp, "tile_positions", book.tile_positions, "does not fit");
    const VqBook& other = first.book[b];
    require(book.stride == other.stride && book.steps == other.steps && book.before == other.before &&
                book.tile_positions == other.tile_positions,
            kOp, "book", b, "must be like that of the first matrix");
    require_aligned(book.codes, 16, kOp, "codes");
    require_aligned(book.fragments, 16, kOp, "fragments");
  }
}

void check_extras(const VqMatrix* matrices, int count, const GemvExtras& extras, int rows) {
  if (extras.activation != Activation::kNone) {
    require(count == 2, kOp, "matrices", count, "must be 2 with an activation");
    require(matrices[0].out == matrices[1].out, kOp, "out", matrices[1].out, "must be that of the first matrix");
    require(extras.residual == nullptr, kOp, "residual", 1, "must be null with an activation");
  }
  if (extras.norm == NormKind::kNone) return;
  require(rows == 1, kOp, "rows", rows, "must be 1 with a norm");
  require_aligned(extras.norm_weight, 2, kOp, "norm_weight");
}

void add_books(Arguments& p, const VqMatrix& w) {
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

Arguments arguments_of(const VqMatrix* matrices, int count, const GemvExtras& extras) {
  Arguments p = {};
  p.extras = extras;
  p.parts = extras.activation == Activation::kNone ? 1 : 2;
  p.scales_bf16 = matrices[0].scales_bf16;
  add_books(p, matrices[0]);
  for (int i = 0; i < count; ++i) {
    const VqMatrix& w = matrices[i];
    const bool second = p.parts == 2 && i == 1;
    p.segment[i] = {{},
                    {},
                    w.scales,
                    extras.bias[i],
                    w.factor,
                    uint32_t(w.out),
                    ceil_div(uint32_t(w.out), kTile),
                    second ? 0 : p.y_width};
    bool shared = i > 0;
    for (int b = 0; b < w.books; ++b) {
      p.segment[i].codes[b] = w.book[b].codes;
      p.segment[i].fragments[b] = static_cast<const uint4*>(w.book[b].fragments);
      shared = shared && w.book[b].fragments == matrices[i - 1].book[b].fragments;
    }
    if (!second) p.units += p.segment[i].tiles, p.y_width += p.segment[i].out;
    if (!shared) ++p.runs;
    p.run_end[p.runs - 1] = p.units;
  }
  return p;
}

}  // namespace
}  // namespace vq

void vq_gemv(const VqMatrix* matrices, int count, const GemvExtras& extras, const VqWorkspace& workspace, const void* x,
             void* y, Type type, int rows, int device, cudaStream_t stream) {
  using vq::kOp;
  require(rows >= 1 && rows <= 8, kOp, "rows", rows, "must be from 1 to 8");
  require(count >= 1 && count <= kMaxSegments, kOp, "matrices", count, "must be from 1 to 3");
  const VqMatrix& first = matrices[0];
  require(first.in >= 8 && first.in % 8 == 0, kOp, "in", first.in, "must be a positive multiple of 8");
  require(first.in <= 1 << 24, kOp, "in", first.in, "must be at most 2^24");
  require(first.books == 1 || first.books == kMaxBooks, kOp, "books", first.books, "must be 1 or 2");
  require(type != Type::kFloat32, kOp, "dtype", static_cast<int>(type), "must be float16 or bfloat16");
  require_aligned(x, 16, kOp, "x");
  require_aligned(y, extras.y_is_f32 ? 4 : 2, kOp, "y");
  int64_t total = 0;
  for (int i = 0; i < count; ++i) {
    vq::check_matrix(matrices[i], first);
    total += matrices[i].out;
  }
  require(total <= 1 << 24, kOp, "out", total, "is too large");
  vq::check_extras(matrices, count, extras, rows);
  const vq::Arguments p = vq::arguments_of(matrices, count, extras);
  const DeviceGuard guard(device, kOp);
  if (type == Type::kFloat16) {
    return vq::launch_typed(p, workspace, static_cast<const __half*>(x), y, rows, device, stream);
  }
  vq::launch_typed(p, workspace, static_cast<const __nv_bfloat16*>(x), y, rows, device, stream);
}

}  // namespace localq
