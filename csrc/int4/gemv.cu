// y = extras(x W^T) for 1 to 8 rows of x, W in 4 bits with a scale and a zero point per group of columns (AWQ, GPTQ),
// up to three matrices with the same x and the same column order. x, bias and residual in f16 or bf16, scales in f16 or
// bf16; sums in f32, rounded once. Needs out % 16 == 0, in % 64 == 0, and groups of a multiple of 32 columns or one of
// all. Deterministic: every sum has a fixed order and there are no atomics.
//
// A tile is 16 rows of W, the operand A of m16n8k16; column c of B is row c of x, so 1 to 8 rows cost the same. Tiles
// are stored in the order in which they are read (layout.cuh): a warp reads a block of 64 columns as 512 bytes, and a
// word of a lane is one operand of a product. The chunks of 8 blocks of the block's tiles, in memory order, are divided
// evenly. A warp takes a contiguous run of them, accumulates while the tile stays the same, and leaves partial sums of
// 16 x rows per tile in slot tile + warp, which is unique.
//
// A weight is (code - zero) * scale. The difference is exact in f16 and bf16 and is the operand; the sum of a group is
// multiplied by the scale in f32. No weight is rounded to 16 bits here, unlike in the definition: each differs from it
// by at most half a unit in the last place of the type of the scales.
//
// Bound: memory. Reads out*in/2 bytes of codes and 2.5 bytes per row and group once, 16 bytes per lane, all 8 blocks of
// the next item in flight (64 KB per multiprocessor), the first before the kernel that produces x has ended. x is in
// shared memory if all its rows fit, with its columns gathered if the weights are ordered by group; else it is read
// through L1. README.md has the instruction counts.
#include "common/check_gemv.h"
#include "int4/gemv_kernel.cuh"
#include "int4/int4.h"

namespace localq {
namespace {

using namespace int4;

constexpr const char* kOp = "int4_gemv";

Segment segment_of(const Int4& w, const void* bias, uint32_t y_begin) {
  require(w.out >= kTile && w.out % kTile == 0, kOp, "out", w.out, "must be a positive multiple of 16");
  require(w.out <= 1 << 28, kOp, "out", w.out, "is too large");
  require_aligned(w.codes, 16, kOp, "codes");
  require_aligned(w.scales, 4, kOp, "scales");
  require_aligned(w.zeros, 1, kOp, "zeros");
  return {w.codes, static_cast<const uint32_t*>(w.scales), w.zeros, bias, uint32_t(w.out), uint32_t(w.out / kTile),
          y_begin};
}

// 2^31 / count, rounded up: i times that, shifted right by 31, is i / count for i and count below 2^15.
uint32_t share_of(uint32_t count) {
  return uint32_t(((uint64_t(1) << 31) + count - 1) / count);
}

// Everything except the split into blocks; adds the units to `units`.
Arguments plan(const Int4* matrices, int count, const GemvExtras& extras, int rows, int group, bool scales_bf16,
               uint32_t& units) {
  const Int4& first = matrices[0];
  Arguments p = {};
  p.extras = extras;
  p.order = first.order;
  p.blocks = uint32_t(first.in / kBlock);
  p.chunks = (p.blocks + kChunk - 1) / kChunk;
  p.groups = uint32_t((first.in + first.group - 1) / first.group);
  p.of_columns = p.groups == 1 ? 0 : share_of(uint32_t(first.group / group));
  p.parts = extras.activation == Activation::kNone ? 1 : 2;
  p.rows = rows;
  while (1 << p.row_bits < rows) ++p.row_bits;
  p.scales_bf16 = scales_bf16;
  for (int i = 0; i < count; ++i) {
    p.segment[i] = segment_of(matrices[i], extras.bias[i], p.parts == 2 ? 0 : p.y_width);
    if (p.parts == 2 && i == 1) break;
    units += p.segment[i].tiles;
    p.y_width += p.segment[i].out;
  }
  return p;
}

// The columns that the kernel accumulates before it scales: the largest of its sizes that divides groups and rows.
int columns_at_once(const Int4& w) {
  const int64_t group = w.group < w.in ? w.group : w.in;
  for (const int size : {128, 64}) {
    if (group % size == 0 && w.in % size == 0) return size;
  }
  return 32;
}

template <typename T, int kGroup>
void launch_typed(Arguments p, uint32_t units, const void* x, void* y, int device, cudaStream_t stream) {
  const DeviceFacts& facts = device_facts(device, kOp);
  const uint32_t budget = facts.shared_bytes_per_block, share = 4 * kTile * p.rows;
  const uint32_t stride = p.blocks * kBlock * uint32_t(sizeof(T)) + kRowPad;
  const uint32_t each = (share + 4) * p.parts;  // partial sums per unit
  uint32_t room = budget - 4 * kWarps - kWarps * share - 16;
  // x must be in shared memory if it is normalized or gathered; the partial sums get the rest.
  const bool changed = p.extras.norm != NormKind::kNone || p.order != nullptr;
  if (changed && uint64_t(p.rows) * stride + each <= room) room -= p.rows * stride;
  const uint32_t fit = room / each;  // units per block
  const uint32_t sms = facts.multiprocessors, waves = (units + sms * fit - 1) / (sms * fit);
  const uint32_t grid = units < sms * waves ? units : sms * waves;
  p.units_each = units / grid, p.units_more = units % grid;
  p.most_tiles = (p.units_each + (p.units_more > 0 ? 1 : 0)) * p.parts;
  const uint32_t others = 4 * (kWarps + share_floats(p) + (p.most_tiles + 3) / 4 * 4);
  const bool staged = others + uint64_t(p.rows) * stride <= budget;
  require(staged || p.extras.norm == NormKind::kNone, kOp, "in", p.blocks * kBlock, "is too large for a norm");
  require(staged || p.order == nullptr, kOp, "in", p.blocks * kBlock, "is too large for an order of columns");
  p.x_stride = staged ? stride : 0;
  launch(kOp, device, int4_gemv_kernel<T, kGroup>, dim3(grid), dim3(kThreads), others + p.rows * p.x_stride, stream, p,
         static_cast<const T*>(x), y);
}

template <typename T>
void launch_grouped(const Arguments& p, uint32_t units, int group, const void* x, void* y, int device,
                    cudaStream_t stream) {
  if (group == 128) return launch_typed<T, 128>(p, units, x, y, device, stream);
  if (group == 64) return launch_typed<T, 64>(p, units, x, y, device, stream);
  launch_typed<T, 32>(p, units, x, y, device, stream);
}

}  // namespace

void int4_gemv(const Int4* matrices, int count, const GemvExtras& extras, const void* x, void* y, Type type,
               Type stored, int rows, int device, cudaStream_t stream) {
  require(rows >= 1 && rows <= 8, kOp, "rows", rows, "must be from 1 to 8");
  require(count >= 1 && count <= kMaxSegments, kOp, "matrices", count, "must be from 1 to 3");
  const Int4& first = matrices[0];
  require(first.in >= kBlock && first.in % kBlock == 0, kOp, "in", first.in, "must be a positive multiple of 64");
  require(first.in <= 1 << 20, kOp, "in", first.in, "must be at most 2^20");
  const bool whole = first.group >= first.in;
  require(first.group >= 32 && (whole || first.group % 32 == 0), kOp, "group", first.group, "must be a multiple of 32");
  require_aligned(x, 16, kOp, "x");
  require_aligned(y, extras.y_is_f32 ? 4 : 2, kOp, "y");
  require(type != Type::kFloat32, kOp, "dtype", static_cast<int>(type), "must be float16 or bfloat16");
  require(stored != Type::kFloat32, kOp, "scales", static_cast<int>(stored), "must be float16 or bfloat16");
  if (first.order != nullptr) require_aligned(first.order, 16, kOp, "order");
  for (int i = 1; i < count; ++i) {
    require(matrices[i].in == first.in, kOp, "in", matrices[i].in, "must be that of the first matrix");
    require(matrices[i].group == first.group, kOp, "group", matrices[i].group, "must be that of the first matrix");
    require(matrices[i].order == first.order, kOp, "order", i, "is not that of the first matrix");
  }
  check_extras(kOp, count, first.out, matrices[count - 1].out, extras, rows);
  const int group = columns_at_once(first);
  uint32_t units = 0;
  const Arguments p = plan(matrices, count, extras, rows, group, stored == Type::kBFloat16, units);
  const DeviceGuard guard(device, kOp);
  if (type == Type::kFloat16) return launch_grouped<__half>(p, units, group, x, y, device, stream);
  launch_grouped<__nv_bfloat16>(p, units, group, x, y, device, stream);
}

}  // namespace localq
