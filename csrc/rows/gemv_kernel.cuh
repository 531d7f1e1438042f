// y = extras(x W^T) for 1 to 8 rows of x and up to three matrices with the same x. Weights are row-major, 16 or 8 bits
// (a Format defines them); x, bias and residual in f16 or bf16; sums in f32, rounded once.
//
// A tile is 16 rows of W, the operand A of m16n8k16. Lane (g, t) loads 16 bytes of row g and of row g + 8 directly into
// operand registers: the column that an index of the product stands for is arbitrary as long as x uses the same order.
// Column c of B is row c of x, so 1 to 8 rows cost the same. With an activation, rows g belong to the gate and rows g +
// 8 to the up projection, so both values of a pair are in one tile.
//
// A block owns consecutive results (counts differ by at most one between blocks) and splits them into tiles. An item is
// kSteps
// * 64 bytes of each row of a tile. The warps take items round-robin, so a block reads long contiguous runs of 16 rows,
// and a warp accumulates in registers while the tile stays the same. Partial sums then go to shared memory; after every
// `group` tiles they are added in item order. Two alternating sets of partial sums need one barrier per group, and the
// loads of the next items stay in flight across it.
//
// Deterministic: every sum has a fixed order and there are no atomics. Bound: memory. The first item of every warp (48
// or 64 KB per block) is requested before the kernel that produces x has ended, and about as much stays in flight until
// the end. Each block requests more than half of the shared memory, so a multiprocessor never holds two: where two fit,
// a kernel that starts early finds some multiprocessors occupied and places two blocks on others, and so do all kernels
// after it (README.md has the cost). The other half is left to decode attention, which runs beside it.
#pragma once

#include "common/check_gemv.h"
#include "common/launch.h"
#include "rows/epilogue.cuh"

namespace localq {

constexpr int kStepBytes = 64;  // of a row: four lanes, 16 bytes each

// A lane's two rows of a tile: the address of its first 16 bytes, and the bytes from there to the end of the row.
struct LaneRows {
  const uint8_t *low, *high;
  int left;

  __device__ __forceinline__ LaneRows from(uint32_t skipped) const {
    return {low + skipped, high + skipped, left - int(skipped)};
  }
};

// Rows past the end repeat the last row of the block; a tile past the end has no bytes left.
__device__ __forceinline__ LaneRows lane_rows(const RowGemv& p, const Span& span, uint32_t tile) {
  if (tile >= span.tiles) return {p.segment[0].rows, p.segment[0].rows, 0};
  const uint32_t lane = threadIdx.x % 32, skipped = lane % 4 * 16, first = span.begin + tile * p.span + lane / 4;
  const bool paired = p.span != kRowTile;
  uint32_t low = min(first, span.end - 1), high = paired ? low : min(first + 8, span.end - 1);
  const uint8_t* const lows = segment_of(p, low).rows;
  const uint8_t* const highs = paired ? p.segment[1].rows : segment_of(p, high).rows;
  return {lows + uint64_t(low) * p.row_bytes + skipped, highs + uint64_t(high) * p.row_bytes + skipped,
          int(p.row_bytes) - int(skipped)};
}

__device__ __forceinline__ void load_step(uint4 (&step)[2], const LaneRows& item, int s) {
  step[0] = load_weights(item.low + s * kStepBytes, item.left, s * kStepBytes);
  step[1] = load_weights(item.high + s * kStepBytes, item.left, s * kStepBytes);
}

// Copies x [rows, in] to shared memory, row by row with a stride; a single row with its norm. Called by all threads;
// the block must synchronize afterwards.
template <typename T>
__device__ __forceinline__ void stage_rows(const RowGemv& p, uint8_t* staged, const T* x, float* scratch) {
  if (p.rows == 1) return stage_x<kXInFlight>(reinterpret_cast<T*>(staged), x, p.in, p.extras, scratch);
  const uint32_t words = p.in / 8;
  for (uint32_t i = threadIdx.x; i < p.rows * words; i += kRowThreads) {
    const uint4 word = reinterpret_cast<const uint4*>(x)[i];
    *reinterpret_cast<uint4*>(staged + i / words * p.x_stride + i % words * 16) = word;
  }
}

// The row of x that a lane reads. Missing rows are zeros: their columns are ignored, and products of zeros draw less
// power, which limits sustained decoding.
struct XSource {
  const uint8_t* x;
  int left;  // as in LaneRows, in bytes of W
};

template <typename Format, typename T>
__device__ __forceinline__ XSource x_source(const RowGemv& p, const uint8_t* staged, const T* x) {
  const uint32_t lane = threadIdx.x % 32, skipped = lane % 4 * 16;
  const bool there = lane / 4 < uint32_t(p.rows);
  const uint32_t row = there ? lane / 4 : 0;
  const uint8_t* from = p.x_stride != 0 ? staged + row * p.x_stride
                                        : reinterpret_cast<const uint8_t*>(x) + uint64_t(row) * p.in * sizeof(T);
  return {from + skipped * Format::kXWords, there ? int(p.row_bytes) - int(skipped) : 0};
}

// Processes all items of the warp in a group of tiles. On entry the ring (the lane's bytes of rows g and g + 8) holds
// the item at the cursor, on exit the next one.
template <typename Format>
__device__ __forceinline__ void sum_group(const RowGemv& p, const Span& span, float* shares, uint32_t first,
                                          const XSource& x, Cursor& cursor, LaneRows& next,
                                          uint4 (&ring)[Format::kSteps][2]) {
  const uint32_t end = min(first + p.group, span.tiles);
  float sum[4] = {};
#pragma unroll 1
  while (cursor.tile < end) {
    const Cursor now = cursor;
    const uint8_t* const from = x.x + now.item * Format::kItemBytes * Format::kXWords;
    const int left = x.left - int(now.item * Format::kItemBytes);
    cursor.advance(p.items);
    next = cursor.tile == now.tile ? next.from(kRowWarps * Format::kItemBytes)
                                   : lane_rows(p, span, cursor.tile).from(cursor.item * Format::kItemBytes);
#pragma unroll
    for (int s = 0; s < Format::kSteps; ++s) {
      uint4 words[Format::kXWords];
#pragma unroll
      for (int k = 0; k < Format::kXWords; ++k) {
        words[k] = load_x(from + s * kStepBytes * Format::kXWords + 16 * k, left, s * kStepBytes);
      }
      Format::multiply(sum, ring[s][0], ring[s][1], words);
      load_step(ring[s], next, s);
    }
    if (cursor.tile == now.tile) continue;
    leave_share(shares + ((now.tile - first) * kRowWarps + threadIdx.x / 32) * kRowTile * p.rows, sum, p.rows);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = 0.f;
  }
}

template <typename T, typename Format>
__global__ void __launch_bounds__(kRowThreads, 2)
    row_gemv_kernel(const __grid_constant__ RowGemv p, const T* x, void* y) {
  extern __shared__ __align__(16) uint8_t memory[];
  const uint32_t set_floats = p.group * kRowWarps * kRowTile * p.rows;
  float* const scratch = reinterpret_cast<float*>(memory);
  float* const shares = scratch + kRowWarps;
  uint8_t* const staged = reinterpret_cast<uint8_t*>(shares + 2 * set_floats);
  const Span span = span_of(p);
  const uint32_t warp = threadIdx.x / 32;
  Cursor cursor = cursor_of(warp, p.items);
  LaneRows item = lane_rows(p, span, cursor.tile).from(cursor.item * Format::kItemBytes);
  uint4 ring[Format::kSteps][2];
#pragma unroll
  for (int s = 0; s < Format::kSteps; ++s) load_step(ring[s], item, s);
  release_dependents();
  dependency_wait();
  if (p.x_stride != 0) stage_rows(p, staged, x, scratch);
  __syncthreads();
  const XSource source = x_source<Format>(p, staged, x);
#pragma unroll 1
  for (uint32_t first = 0, set = 0; first < span.tiles; first += p.group, set ^= 1) {
    float* const mine = shares + set * set_floats;
    sum_group<Format>(p, span, mine, first, source, cursor, item, ring);
    __syncthreads();
    write_group<T>(p, span, mine, first, y);
  }
}

// The checks of both launchers, except those of the matrices.
inline void check_row_gemv(const char* op, const int64_t* outs, int count, const GemvExtras& extras, const void* x,
                           const void* y, Type type, int rows) {
  require(rows >= 1 && rows <= 8, op, "rows", rows, "must be from 1 to 8");
  require(type != Type::kFloat32, op, "dtype", static_cast<int>(type), "must be float16 or bfloat16");
  require_aligned(x, 16, op, "x");
  require_aligned(y, extras.y_is_f32 ? 4 : 2, op, "y");
  int64_t total = 0;
  for (int i = 0; i < count; ++i) {
    require(outs[i] >= 1, op, "out", outs[i], "must be positive");
    total += outs[i];
  }
  require(total <= 1 << 30, op, "out", total, "is too large");
  check_extras(op, count, outs[0], outs[count - 1], extras, rows);
}

// Plans and launches; the caller has set segments, extras, in, row_bytes and rows of `p`.
template <typename T, typename Format>
void launch_row_gemv(const char* op, RowGemv p, int count, const void* x, void* y, int device, cudaStream_t stream) {
  const DeviceFacts& facts = device_facts(device, op);
  const bool paired = p.extras.activation != Activation::kNone;
  p.items = (p.row_bytes + Format::kItemBytes - 1) / Format::kItemBytes;
  p.span = paired ? kRowTile / 2 : kRowTile;
  for (int i = 0; i < (paired ? 1 : count); ++i) p.results += p.segment[i].out;
  const uint32_t grid = cut_results(p, uint32_t(facts.multiprocessors));
  const uint32_t tiles = tiles_of(p.each + (p.more > 0), p.span);
  const uint32_t tile_bytes = kRowWarps * kRowTile * p.rows * sizeof(float), fit = kShareBudget / tile_bytes;
  p.group = tiles < fit ? tiles : fit;
  const uint32_t others = kRowWarps * sizeof(float) + 2 * p.group * tile_bytes;
  const uint32_t stride = (p.in * uint32_t(sizeof(T)) + 127) / 128 * 128 + Format::kXPad;
  const bool staged = others + p.rows * stride <= uint32_t(facts.shared_bytes_per_block);
  require(staged || p.extras.norm == NormKind::kNone, op, "in", p.in, "is too large for a norm on this device");
  p.x_stride = staged ? stride : 0;
  const uint32_t needed = others + p.rows * p.x_stride;
  const uint32_t alone = uint32_t(facts.shared_bytes_per_block) / 2 + 1024;  // two blocks do not fit
  launch(op, device, {1, true}, row_gemv_kernel<T, Format>, grid, kRowThreads, needed > alone ? needed : alone, stream,
         p, static_cast<const T*>(x), y);
}

}  // namespace localq
