// Epilogue of the products with row-major weights (gemv_kernel.cuh): which results a block owns, the sum of the warps'
// partial sums, and the final write.
#pragma once

#include "common/gemv.cuh"
#include "common/row_loads.cuh"
#include "common/types.h"

namespace localq {

constexpr int kRowWarps = 8, kRowThreads = 32 * kRowWarps;
constexpr int kRowTile = 16;                  // rows of W in a product
constexpr uint32_t kShareBudget = 16 * 1024;  // bytes of one set of partial sums, unless a single tile needs more

struct RowSegment {
  const uint8_t* rows;  // [out] of row_bytes
  const float* scales;  // [out] or null: f32 scale of each row, applied to its sum
  const void* bias;     // T [out] or null
  uint32_t out;
  const void* scales_16;  // T [out] or null: 16-bit scale of each row
};

struct RowGemv {
  RowSegment segment[kMaxSegments];
  GemvExtras extras;
  uint32_t in, row_bytes, items;  // items: per tile
  uint32_t results;               // per row of x
  uint32_t span;                  // results per tile: 16, or 8 pairs
  uint32_t x_stride;              // row stride of x in shared memory, in bytes; 0: x is read from global memory
  uint32_t group;                 // tiles whose partial sums are kept at a time
  uint32_t each, more;  // results per block, number of blocks with one more; set by `cut_results`, read by `span_of`
  int rows;             // of x
};

// Maps row `o` of the concatenated matrices to its segment number, and `o` to the row within the segment. Branch-free:
// it precedes the first loads of a block, where nothing hides its latency.
__device__ __forceinline__ uint32_t segment_number(const RowGemv& p, uint32_t& o) {
  static_assert(kMaxSegments == 3, "two borders");
  const uint32_t first = p.segment[0].out, second = first + p.segment[1].out;  // absent segments have no rows
  const bool past_first = o >= first, past_second = o >= second;
  o -= past_second ? second : past_first ? first : 0;
  return uint32_t(past_first) + uint32_t(past_second);
}

// The same, returning the segment.
__device__ __forceinline__ const RowSegment& segment_of(const RowGemv& p, uint32_t& o) {
  return p.segment[segment_number(p, o)];
}

// Number of tiles of `span` results. There are two spans, so no division is needed, which would be about 30 dependent
// instructions.
__host__ __device__ __forceinline__ uint32_t tiles_of(uint32_t results, uint32_t span) {
  return span == kRowTile ? (results + kRowTile - 1) / kRowTile : (results + kRowTile / 2 - 1) / (kRowTile / 2);
}

// Distributes the results over at most `blocks` blocks; returns the grid size.
inline uint32_t cut_results(RowGemv& p, uint32_t blocks) {
  const uint32_t grid = p.results < blocks ? p.results : blocks;
  p.each = p.results / grid, p.more = p.results % grid;
  return grid;
}

// The results of one block.
struct Span {
  uint32_t begin, end, tiles;
};

__device__ __forceinline__ Span span_of(const RowGemv& p) {
  const uint32_t begin = blockIdx.x * p.each + min(blockIdx.x, p.more), count = p.each + (blockIdx.x < p.more);
  return {begin, begin + count, tiles_of(count, p.span)};
}

// The next item of a warp; the warps take items round-robin.
struct Cursor {
  uint32_t tile, item;

  __device__ __forceinline__ void advance(uint32_t items, uint32_t warps = kRowWarps) {
    item += warps;
    while (item >= items) item -= items, ++tile;
  }
};

// The first item of a warp.
__device__ __forceinline__ Cursor cursor_of(uint32_t warp, uint32_t items) {
  Cursor cursor = {0, 0};
  cursor.advance(items, warp);
  return cursor;
}

// Stores the warp's partial sums of a tile: the lane holds rows g and g + 8 of the tile, rows 2 t and 2 t + 1 of x.
__device__ __forceinline__ void leave_share(float* share, const float (&sum)[4], int rows) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 2 * t + i % 2;
    if (row < rows) share[(g + i / 2 * 8) * rows + row] = sum[i];
  }
}

// Sum of the partial sums of row `r` of a tile, in item order.
__device__ __forceinline__ float sum_shares(const RowGemv& p, const float* tile_shares, uint32_t tile, uint32_t r,
                                            int row) {
  const uint32_t first = tile * p.items % kRowWarps, count = min(p.items, uint32_t(kRowWarps));
  const float* share = tile_shares + r * p.rows + row;
  float sum = 0.f, all[kRowWarps];  // all loads first, then the additions
#pragma unroll
  for (uint32_t i = 0; i < kRowWarps; ++i)
    all[i] = i < count ? share[(first + i) % kRowWarps * kRowTile * p.rows] : 0.f;
#pragma unroll
  for (uint32_t i = 0; i < kRowWarps; ++i) sum += all[i];
  return sum;
}

template <typename T>
__device__ __forceinline__ float finished(const RowSegment& segment, uint32_t o, float sum) {
  if (segment.scales != nullptr) sum *= segment.scales[o];
  if (segment.scales_16 != nullptr) sum *= to_float(static_cast<const T*>(segment.scales_16)[o]);
  return segment.bias == nullptr ? sum : sum + to_float(static_cast<const T*>(segment.bias)[o]);
}

template <typename T>
__device__ __forceinline__ void write_result(const RowGemv& p, uint32_t result, int row, float first, float second,
                                             void* y) {
  const uint64_t at = uint64_t(row) * p.results + result;
  float value;
  if (p.extras.activation != Activation::kNone) {
    value = activate(finished<T>(p.segment[0], result, first), p.extras.activation) *
            finished<T>(p.segment[1], result, second);
  } else {
    uint32_t o = result;
    const RowSegment& segment = segment_of(p, o);
    value = finished<T>(segment, o, first);
  }
  write_value<T>(p.extras, at, value, y);
}

// Writes the results of at most one group of tiles, from tile `first`, from their partial sums.
template <typename T>
__device__ __forceinline__ void write_group(const RowGemv& p, const Span& span, const float* shares, uint32_t first,
                                            void* y) {
  const uint32_t begin = span.begin + first * p.span, count = min(p.group * p.span, span.end - begin);
  const uint32_t tile_floats = kRowWarps * kRowTile * p.rows;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < count * p.rows; i += kRowThreads) {
    const bool paired = p.span != kRowTile;
    const uint32_t row = p.rows == 1 ? 0 : i / count, result = i - row * count;
    const uint32_t tile = paired ? result / (kRowTile / 2) : result / kRowTile, r = result - tile * p.span;
    const float* tile_shares = shares + tile * tile_floats;
    const float sum = sum_shares(p, tile_shares, first + tile, r, row);
    const float second = paired ? sum_shares(p, tile_shares, first + tile, r + p.span, row) : 0.f;
    write_result<T>(p, begin + result, row, sum, second, y);
  }
}

}  // namespace localq
