// y = extras(x W^T), W in 4 bits with 16 values of its own for every row (localq/quant/squeezellm.py): the frame of
// row_gemv.cuh, with products of bytes.
//   codes  u8  [out, in / 2], one to three that share x     x T [rows, in]
//   values f16 [out, 16]                                    y T or f32 [rows, sum of outs]
// Needs in % 32 == 0; out is free. The look-up is in registers: a lane of m16n8k32 has two rows of a tile, whose 16
// values as two bytes each (rowlut_table.cuh) are 8 registers a row. PRMT takes four codes as they lie in memory and
// gives four bytes, which are the operand A: no code is shifted, masked or looked up in shared memory by itself. x is
// three bytes a value (rowlut_x.cuh), which are columns of B that one row of x leaves idle. Sums of bytes are exact,
// and stay whole numbers until all warps' are added up; then they become f32, are scaled, and rounded once.
//
// Per 16 weights a lane does 16 PRMT, 2 LOP3 and 4 SHF: 1.4 a weight of the ALU pipe, against 2.0 that an H200 has at
// the rate of its memory and 5.8 of an RTX 3090. Bound: memory; on an H200 it waits besides (README.md). Reads out *
// (in / 2 + 32) bytes once. Every block splits x into bytes and makes its tables by itself; the tables before the
// kernel that makes x has ended.
#include "rowlut.h"
#include "rowlut_gemv.cuh"

namespace localq {
namespace {

using namespace rowlut;

constexpr const char* kOp = "rowlut_gemv";
constexpr uint32_t kFixedBytes = (kWarps<1> + 16) * sizeof(float);
constexpr int kFewRows = 2;                // of x: one tile of B
constexpr uint32_t kSetBytes = 48 * 1024;  // of one set of shares, where a single tile needs no more
constexpr uint32_t kLeastTables = 64;      // rows of W whose tables a block of threads has room for, at least

uint32_t stride_of(int64_t in) {
  return uint32_t((in + 127) / 128 * 128) + kXPad;
}

uint32_t tile_bytes_of(int rows) {
  const uint32_t of_row = rows <= kFewRows ? kWarps<1> * kSlots<1> : kWarps<kPlanes> * kSlots<kPlanes>;
  return of_row * kRowTile * uint32_t(rows) * sizeof(int64_t);
}

// Rows of x, at most `rows`, that fit beside shares of one tile and the fewest tables; 0 where none does.
int rows_that_fit(int64_t in, int rows, int shared_bytes) {
  for (; rows > 0; --rows) {
    const int64_t x = int64_t(rows) * kPlanes * stride_of(in);
    if (kFixedBytes + 2 * tile_bytes_of(rows) + kLeastTables * kTableBytesOfRow + x <= shared_bytes) break;
  }
  return rows;
}

template <typename T, int kTiles>
void launch_tiles(RowLutGemv p, const void* x, void* y, int device, cudaStream_t stream) {
  const DeviceFacts& facts = device_facts(device, kOp);
  RowGemv& row = p.row;
  row.items = (row.row_bytes + kItemBytes<kTiles> - 1) / kItemBytes<kTiles>;
  const uint32_t parts = row.span == kRowTile ? 1 : 2, tile_bytes = tile_bytes_of(row.rows);
  const uint32_t x_bytes = row.rows * kPlanes * row.x_stride, sms = facts.multiprocessors;
  const uint32_t room = uint32_t(facts.shared_bytes_per_block) - kFixedBytes - x_bytes;
  const uint32_t fit = (room - 2 * tile_bytes) / kTableBytesOfRow / 4 * 4 / parts;  // results of a block
  const uint32_t waves = (row.results + sms * fit - 1) / (sms * fit);
  const uint32_t grid = row.results < sms * waves ? row.results : sms * waves;
  p.most = ((row.results + grid - 1) / grid * parts + 3) / 4 * 4;
  const uint32_t tiles = ((row.results + grid - 1) / grid + row.span - 1) / row.span;
  const uint32_t left = (room - p.most * kTableBytesOfRow) / (2 * tile_bytes), held = kSetBytes / tile_bytes;
  const uint32_t most = left < held ? left : held;
  row.group = tiles < most ? tiles : most > 0 ? most : 1;
  const uint32_t needed = kFixedBytes + 2 * row.group * tile_bytes + p.most * kTableBytesOfRow + x_bytes;
  const uint32_t alone = uint32_t(facts.shared_bytes_per_block) / 2 + 1024;  // two of these are more than there is
  launch(kOp, device, rowlut_gemv_kernel<T, kTiles>, grid, 32 * kWarps<kTiles>, needed > alone ? needed : alone, stream,
         p, static_cast<const T*>(x), y);
}

// As many rows of x at a time as shared memory holds: where it is small or x wide, W is read more than once.
template <typename T>
void launch_rows(RowLutGemv p, const void* x, void* y, int rows, int device, cudaStream_t stream) {
  const void* const residual = p.row.extras.residual;
  for (int first = 0; first < rows; first += p.row.rows) {
    p.row.rows = rows_that_fit(p.row.in, rows - first, device_facts(device, kOp).shared_bytes_per_block);
    require(p.row.rows > 0, kOp, "in", p.row.in, "is too large for the shared memory of this device");
    const uint64_t at = uint64_t(first) * p.row.results;
    if (residual != nullptr) p.row.extras.residual = static_cast<const T*>(residual) + at;
    const T* const from = static_cast<const T*>(x) + uint64_t(first) * p.row.in;
    uint8_t* const to = static_cast<uint8_t*>(y) + at * (p.row.extras.y_is_f32 ? sizeof(float) : sizeof(T));
    if (p.row.rows <= kFewRows) launch_tiles<T, 1>(p, from, to, device, stream);
    if (p.row.rows > kFewRows) launch_tiles<T, kPlanes>(p, from, to, device, stream);
  }
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
  p.row.x_stride = stride_of(in);
  const DeviceGuard guard(device, kOp);
  if (type == Type::kFloat16) return launch_rows<__half>(p, x, y, rows, device, stream);
  launch_rows<__nv_bfloat16>(p, x, y, rows, device, stream);
}

int64_t rowlut_widest(int device) {
  const int shared_bytes = device_facts(device, kOp).shared_bytes_per_block;
  int64_t in = 0;
  while (in < 1 << 24 && rows_that_fit(in + 128, 1, shared_bytes) > 0) in += 128;
  return in;
}

}  // namespace localq
