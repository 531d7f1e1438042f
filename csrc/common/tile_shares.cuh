// What products of tiles of 16 rows share: the split of a launch into blocks and warps, and the sum of the warps'
// partial sums. A launch is described by a struct P of the format, with these fields:
//
//   segment[]                for each matrix: out, tiles, y_begin and bias
//   extras, rows, row_bits   as in gemv.h; log2 of rows, rounded up
//   parts                    tiles of a unit: 1, or with an activation 2, of the gate and of the up projection
//   units_each, units_more   units of a block, and how many blocks have one more
//   chunks, warps            items of a tile; warps of a block
//   y_width, most_tiles      columns of y; tiles of a block at most
#pragma once

#include "common/gemv.cuh"

namespace localq {

constexpr int kTileRows = 16;  // rows of a tile

// Floats of all partial sums of a block.
template <typename P>
__host__ __device__ __forceinline__ uint32_t share_floats(const P& p) {
  return (p.most_tiles + p.warps) * kTileRows * p.rows;
}

// The tiles of a block: those of units unit .. unit + tiles / parts - 1. Items are chunks of tiles in memory order;
// each warp has a contiguous run.
struct Work {
  uint32_t unit, tiles, chunks;
};

template <typename P>
__device__ __forceinline__ Work work_of(const P& p) {
  const uint32_t units = p.units_each + (blockIdx.x < p.units_more ? 1 : 0);
  return {blockIdx.x * p.units_each + min(blockIdx.x, p.units_more), units * p.parts, p.chunks};
}

// The first item of a warp.
template <typename P>
__device__ __forceinline__ uint32_t begin_of(const P& p, const Work& work, uint32_t warp) {
  return work.tiles * work.chunks * warp / p.warps;
}

// The warps that have the first and the last item of a tile.
struct Owners {
  uint16_t first, last;
};

// Partial sums of a block: shares [tiles + warps][kTileRows][rows], where slot tile + warp is unique to a warp and a
// tile, and owners [tiles].
struct Shares {
  float* sums;
  Owners* owners;
};

// The matrix of tile `tile` of the block, and the tile's number there.
template <typename P>
__device__ __forceinline__ const auto& place_of(const P& p, uint32_t unit, uint32_t& tile) {
  if (p.parts == 2) {
    const uint32_t part = tile % 2;
    tile = unit + tile / 2;
    return p.segment[part];
  }
  tile += unit;
  uint32_t segment = 0;
  while (tile >= p.segment[segment].tiles) tile -= p.segment[segment++].tiles;
  return p.segment[segment];
}

// Stores the warp's partial sums of a tile.
__device__ __forceinline__ void leave_share(const Shares& shares, float (&sum)[4], uint32_t tile, int rows) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, slot = tile + threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 2 * t + i % 2;
    if (row < rows) shares.sums[(slot * kTileRows + g + i / 2 * 8) * rows + row] = sum[i];
    sum[i] = 0.f;
  }
}

// Adds the partial sums of row `r` of a tile in column order.
__device__ __forceinline__ float sum_shares(const Shares& shares, uint32_t tile, uint32_t r, int row, int rows) {
  const Owners owners = shares.owners[tile];
  float sum = 0.f;
  for (uint32_t warp = owners.first; warp <= owners.last; ++warp) {
    sum += shares.sums[((tile + warp) * kTileRows + r) * rows + row];
  }
  return sum;
}

template <typename T, typename P, typename Segment>
__device__ __forceinline__ void write_result(const P& p, const Segment& w, uint32_t o, int row, float value, float up,
                                             void* y) {
  if (w.bias != nullptr) value += to_float(static_cast<const T*>(w.bias)[o]);
  const uint64_t at = uint64_t(row) * p.y_width + w.y_begin + o;
  if (p.extras.activation != Activation::kNone) {
    const void* bias = p.segment[1].bias;
    if (bias != nullptr) up += to_float(static_cast<const T*>(bias)[o]);
    value = activate(value, p.extras.activation) * up;
  }
  write_value<T>(p.extras, at, value, y);
}

template <typename T, typename P>
__device__ __forceinline__ void write_tiles(const P& p, const Shares& shares, const Work& work, void* y) {
  const uint32_t units = work.tiles / p.parts;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < units * kTileRows << p.row_bits;
       i += 32 * p.warps) {  // shifts instead of slow divisions
    const uint32_t r = i % kTileRows, row = i / kTileRows & ((1u << p.row_bits) - 1),
                   tile = (i / kTileRows >> p.row_bits) * p.parts;
    if (row >= uint32_t(p.rows)) continue;
    uint32_t number = tile;
    const auto& w = place_of(p, work.unit, number);
    const float sum = sum_shares(shares, tile, r, row, p.rows);
    const float up = p.parts == 2 ? sum_shares(shares, tile + 1, r, row, p.rows) : 0.f;
    write_result<T>(p, w, number * kTileRows + r, row, sum, up, y);
  }
}

}  // namespace localq
