// y = extras(x W^T), W in 4 bits with 16 values of its own for every row (localq/quant/squeezellm.py), up to three
// matrices that share x; results are cut into blocks and tiles as in rows/gemv_kernel.cuh.
//   codes  u8  [out, in / 2]     x T [rows, in], 1 to 8 rows     codes in tiles or row by row (rowlut.h)
//   values f16 [out, 16]         y T or f32 [rows, sum of outs]
// Needs in % 32 == 0; out is free.
//
// All warps of a block work on the same 16 rows of W, each on its own columns. The pairs of values that a byte of codes
// can stand for in these rows are a table in shared memory (table.cuh), and one PRMT and one load make of a byte
// a register of m16n8k16's operand A: exact f16. Column c of B is row c of x (activations.cuh), so its columns are
// those of the codes as they lie in memory, and all rows of x share the look-ups. Two blocks of 8 warps share a
// multiprocessor where both fit, and one looks up while the other is between tiles; else a block has 16, and where two
// tables fit the next tile's is made by the warps that have looked up theirs. Sums are f32: those of a warp,
// then those of the warps in the order of the columns; so a result depends on nothing but its rows of W and of x, and
// on whether there are 8 warps or 16.
//
// Bound: memory, and on an H200 shared memory beside it (README.md has the counts). Reads out * (in / 2 + 32) bytes
// once, 32 KB of codes in flight a multiprocessor and, with two rows of x and more, two tiles on their way into L2. The
// first codes and the first table come before the kernel that makes x has ended.
#include "rowlut/gemv_kernel.cuh"
#include "rowlut/rowlut.h"

namespace localq {
namespace {

using namespace rowlut;

constexpr const char* kOp = "rowlut_gemv";
constexpr uint32_t kFixedBytes = (kMostWarps + 8) * sizeof(float);
constexpr uint32_t kGroupRows = 8;                                  // of codes in tiles
constexpr uint32_t kFarBytes = 64 * 1024, kNearBytes = 128 * 1024;  // of tiles that L2 has room for two of, or one

// How many tiles ahead of those of its warps a block asks for codes: with 132 multiprocessors 17 MB are under way. With
// one row of x it is slower with than without (README.md).
uint32_t tiles_ahead(uint32_t row_bytes, int rows) {
  const uint64_t bytes = uint64_t(kRowTile) * row_bytes;
  if (rows == 1 || bytes > kNearBytes) return 0;
  return bytes > kFarBytes ? 1 : 2;
}

template <typename T, bool kStaged>
void launch_typed(const RowLutGemv& p, uint32_t grid, uint32_t needed, const void* x, void* y, int device,
                  cudaStream_t stream) {
  // more than there is of one of these more: as many blocks a multiprocessor as are meant (rows/gemv_kernel.cuh)
  const uint32_t blocks = kMostWarps / p.warps;
  const uint32_t alone = uint32_t(device_facts(device, kOp).shared_bytes_per_block) / (blocks + 1) + 1024;
  launch(kOp, device, rowlut_gemv_kernel<T, kStaged>, dim3(grid), dim3(32 * p.warps), needed > alone ? needed : alone,
         stream, p, static_cast<const T*>(x), y);
}

// Two blocks of 8 warps a multiprocessor where a table, two tiles of shares and x fit twice; else one of 16. Shared
// memory: a table and two tiles of shares, then x, then the other table, then more shares, as they fit.
template <typename T>
void launch_planned(RowLutGemv p, const void* x, void* y, int device, cudaStream_t stream) {
  const DeviceFacts& facts = device_facts(device, kOp);
  const uint32_t results = p.row.results, stride = p.steps * kStepXBytes + kXPad;
  const uint32_t own = facts.system_bytes_per_block, half = (facts.shared_bytes_per_block + own) / 2 - own;
  const uint64_t of_row = kMostWarps / 2 * kRowTile * sizeof(float) * 2 + stride;  // its shares and itself
  const bool pair = kPairTableBytes + kFixedBytes + p.row.rows * of_row <= half;
  p.warps = pair ? kMostWarps / 2 : kMostWarps;
  const uint32_t budget = pair ? half : facts.shared_bytes_per_block, sms = facts.multiprocessors * (pair ? 2 : 1);
  // In tiles a block begins between groups of eight rows where every one has such a group, so that loads are of one
  // group; that makes no block have more tiles.
  p.unit = p.row_stride != p.row.row_bytes && results / kGroupRows >= sms ? kGroupRows : 1;
  const uint32_t units = results / p.unit, grid = units < sms ? units : sms;
  p.row.each = units / grid, p.row.more = units % grid;
  const uint32_t tiles = tiles_of((p.row.each + (p.row.more > 0)) * p.unit, p.row.span);
  const uint32_t share = p.warps * kRowTile * p.row.rows * sizeof(float);
  uint32_t needed = kPairTableBytes + kFixedBytes + 2 * share;
  require(needed <= budget, kOp, "rows", p.row.rows, "need more shared memory than this device has");
  const bool staged = needed + uint64_t(p.row.rows) * stride <= budget;
  require(staged || p.row.extras.norm == NormKind::kNone, kOp, "in", p.row.in, "is too large for a norm");
  p.row.x_stride = staged ? stride : 0;
  needed += p.row.rows * p.row.x_stride;
  p.two = tiles > 1 && needed + kPairTableBytes <= budget;
  if (p.two) needed += kPairTableBytes;
  const uint32_t fit = 1 + (budget - needed) / (2 * share), held = share < kShareBudget ? kShareBudget / share : 1;
  p.row.group = tiles;
  if (p.row.group > fit) p.row.group = fit;
  if (p.row.group > held) p.row.group = held;
  needed += (p.row.group - 1) * 2 * share;
  if (staged) return launch_typed<T, true>(p, grid, needed, x, y, device, stream);
  launch_typed<T, false>(p, grid, needed, x, y, device, stream);
}

}  // namespace

void rowlut_gemv(const RowLut* matrices, int count, const GemvExtras& extras, const void* x, void* y, Type type,
                 int rows, int device, cudaStream_t stream) {
  require(count >= 1 && count <= kMaxSegments, kOp, "matrices", count, "must be from 1 to 3");
  const int64_t in = matrices[0].in;
  require(in >= 32 && in % 32 == 0, kOp, "in", in, "must be a positive multiple of 32");
  require(in <= 1 << 24, kOp, "in", in, "must be at most 2^24");
  RowLutGemv p = {};
  int64_t outs[kMaxSegments] = {};
  const bool paired = extras.activation != Activation::kNone;
  for (int i = 0; i < count; ++i) {
    require(matrices[i].in == in, kOp, "in", matrices[i].in, "must be that of the first matrix");
    require_aligned(matrices[i].codes, 16, kOp, "codes");
    require_aligned(matrices[i].table, 16, kOp, "table");
    require(matrices[i].tiled == matrices[0].tiled, kOp, "tiled", matrices[i].tiled,
            "must be that of the first matrix");
    check_rowlut_tiles(matrices[i], kOp);
    outs[i] = matrices[i].out;
    p.row.segment[i] = {matrices[i].codes, nullptr, extras.bias[i], uint32_t(outs[i]), nullptr};
    p.values[i] = static_cast<const __half*>(matrices[i].table);
    if (!paired || i == 0) p.row.results += uint32_t(outs[i]);
  }
  check_row_gemv(kOp, outs, count, extras, x, y, type, rows);
  p.row.extras = extras;
  p.row.in = uint32_t(in);
  p.row.row_bytes = uint32_t(in / 2);
  p.row.span = paired ? kRowTile / 2 : kRowTile;
  p.row.rows = rows;
  p.steps = (p.row.row_bytes + kStepBytes - 1) / kStepBytes;
  p.step_bytes = matrices[0].tiled ? kGroupRows * kStepBytes : kStepBytes;
  p.row_stride = matrices[0].tiled ? kStepBytes : p.row.row_bytes;
  p.tile_bytes = p.row.span * p.row.row_bytes;
  p.ahead = tiles_ahead(p.row.row_bytes, rows);
  while (1 << p.row_bits < rows) ++p.row_bits;
  const DeviceGuard guard(device, kOp);
  if (type == Type::kFloat16) return launch_planned<__half>(p, x, y, device, stream);
  launch_planned<__nv_bfloat16>(p, x, y, device, stream);
}

}  // namespace localq
