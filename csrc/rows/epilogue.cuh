// Which results a block of the products row by row has (gemv_kernel.cuh says how they are made), how the warps' shares
// of them are added, and what is done to a sum until it is written.
#pragma once

#include "common/gemv.cuh"
#include "common/row_loads.cuh"
#include "common/types.h"

namespace localq {

constexpr int kRowWarps = 8, kRowThreads = 32 * kRowWarps;
constexpr int kRowTile = 16;                  // rows of W in a product
constexpr uint32_t kShareBudget = 16 * 1024;  // bytes of one set of shares, where a single tile needs no more

struct RowSegment {
  const uint8_t* rows;  // [out] of row_bytes
  const float* scales;  // [out], or null: of every row, applied to its sum
  const void* bias;     // T [out] or null
  uint32_t out;
  const void* scales_16;  // T [out], or null: the same in 16 bit
};

struct RowGemv {
  RowSegment segment[kMaxSegments];
  GemvExtras extras;
  uint32_t in, row_bytes, items;  // items: of a tile
  uint32_t results;               // per row of x
  uint32_t span;                  // results of a tile: 16, or 8 pairs
  uint32_t x_stride;              // bytes from row to row of x in shared memory; 0: x is read where it is
  uint32_t group;                 // tiles whose shares are kept at a time
  uint32_t each, more;            // results of a block, how many blocks have one more; of `cut_results`, for `span_of`
  int rows;                       // of x
};

// Row `o` of the matrices behind each other: the number of its segment, and its own there. Without a branch, since it
// stands in front of a block's first loads, when nothing is under way that would hide it.
__device__ __forceinline__ uint32_t segment_number(const RowGemv& p, uint32_t& o) {
  static_assert(kMaxSegments == 3, "two borders");
  const uint32_t first = p.segment[0].out, second = first + p.segment[1].out;  // what is not there has no rows
  const bool past_first = o >= first, past_second = o >= second;
  o -= past_second ? second : past_first ? first : 0;
  return uint32_t(past_first) + uint32_t(past_second);
}

// The same: its segment.
__device__ __forceinline__ const RowSegment& segment_of(const RowGemv& p, uint32_t& o) {
  return p.segment[segment_number(p, o)];
}

// Tiles of so many results. There are two spans, so nothing is divided: that is a chain of some 30 instructions.
__host__ __device__ __forceinline__ uint32_t tiles_of(uint32_t results, uint32_t span) {
  return span == kRowTile ? (results + kRowTile - 1) / kRowTile : (results + kRowTile / 2 - 1) / (kRowTile / 2);
}

// Cuts the results among `blocks` that there may be at most: the grid.
inline uint32_t cut_results(RowGemv& p, uint32_t blocks) {
  const uint32_t grid = p.results < blocks ? p.results : blocks;
  p.each = p.results / grid, p.more = p.results % grid;
  return grid;
}

// The results of a block.
struct Span {
  uint32_t begin, end, tiles;
};

__device__ __forceinline__ Span span_of(const RowGemv& p) {
  const uint32_t begin = blockIdx.x * p.each + min(blockIdx.x, p.more), count = p.each + (blockIdx.x < p.more);
  return {begin, begin + count, tiles_of(count, p.span)};
}

// This warp's next item; `warps` take turns.
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

// Leaves the warp's sums of a tile: the lane has rows g and g + 8 of it, rows 2 t and 2 t + 1 of x.
__device__ __forceinline__ void leave_share(float* share, const float (&sum)[4], int rows) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 2 * t + i % 2;
    if (row < rows) share[(g + i / 2 * 8) * rows + row] = sum[i];
  }
}

// Sum of the shares of row `r` of a tile, in the order of its items.
__device__ __forceinline__ float sum_shares(const RowGemv& p, const float* tile_shares, uint32_t tile, uint32_t r,
                                            int row) {
  const uint32_t first = tile * p.items % kRowWarps, count = min(p.items, uint32_t(kRowWarps));
  const float* share = tile_shares + r * p.rows + row;
  float sum = 0.f, all[kRowWarps];  // loaded at once, then added
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

// Writes the results of the tiles from `first` on, at most a group, from their shares.
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
