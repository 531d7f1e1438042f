// int4_gemv: how a launch is cut into blocks and their warps, and how what these leave becomes results.
#pragma once

#include "common/gemv.cuh"
#include "int4/layout.cuh"

namespace localq::int4 {

constexpr int kWarps = 16, kThreads = 32 * kWarps;
constexpr int kChunk = 8;  // blocks of an item; all of the next item's are in flight
constexpr int kChunkColumns = kChunk * kBlock;
constexpr int kRowPad = 64;  // bytes between rows of x in shared memory: two rows fill all banks

// One matrix of a launch.
struct Segment {
  const uint8_t* codes;
  const uint32_t* scales;  // of rows g and g + 8
  const uint8_t* zeros;
  const void* bias;
  uint32_t out, tiles;
  uint32_t y_begin;  // first column of its results
};

// A launch. A unit is what ends in 16 results: one tile, or with an activation the gate's and the up's (`parts` = 2).
struct Arguments {
  Segment segment[kMaxSegments];
  GemvExtras extras;
  const uint16_t* order;
  uint32_t units_each, units_more;  // units of every block, blocks that have one more
  uint32_t parts, blocks, chunks;
  uint32_t groups;      // as stored
  uint32_t of_columns;  // kGroup columns, number i of them, have group i * of_columns / 2^31
  uint32_t y_width;
  uint32_t x_stride;    // bytes from row to row of x in shared memory; 0: x is read where it is
  uint32_t most_tiles;  // of a block
  int rows;
  uint32_t row_bits;  // rows rounded up to a power of two
  bool scales_bf16;
};

// Floats of all shares of a block.
__host__ __device__ __forceinline__ uint32_t share_floats(const Arguments& p) {
  return (p.most_tiles + kWarps) * kTile * p.rows;
}

// A block's tiles: those of units unit .. unit + tiles / parts - 1. Items, chunks of them, in the order of memory; a
// warp has a run of them.
struct Work {
  uint32_t unit, tiles, chunks;

  __device__ __forceinline__ uint32_t begin(uint32_t warp) const {
    return tiles * chunks * warp / kWarps;
  }
};

__device__ __forceinline__ Work work_of(const Arguments& p) {
  const uint32_t units = p.units_each + (blockIdx.x < p.units_more ? 1 : 0);
  return {blockIdx.x * p.units_each + min(blockIdx.x, p.units_more), units * p.parts, p.chunks};
}

// The warps that have the first and the last item of a tile.
struct Owners {
  uint16_t first, last;
};

// What a block keeps of its tiles: shares [tiles + kWarps][kTile][rows], that of a warp for a tile in slot tile + warp,
// which no other can have; and who left them [tiles].
struct Shares {
  float* sums;
  Owners* owners;
};

// Tile `tile` of the block: its matrix, and its number there.
__device__ __forceinline__ const Segment& place_of(const Arguments& p, uint32_t unit, uint32_t& tile) {
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

// Leaves the warp's share of a tile.
__device__ __forceinline__ void leave_share(const Shares& shares, float (&sum)[4], uint32_t tile, int rows) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, slot = tile + threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 2 * t + i % 2;
    if (row < rows) shares.sums[(slot * kTile + g + i / 2 * 8) * rows + row] = sum[i];
    sum[i] = 0.f;
  }
}

// Adds the shares of row `r` of a tile in the order of their columns.
__device__ __forceinline__ float sum_shares(const Shares& shares, uint32_t tile, uint32_t r, int row, int rows) {
  const Owners owners = shares.owners[tile];
  float sum = 0.f;
  for (uint32_t warp = owners.first; warp <= owners.last; ++warp) {
    sum += shares.sums[((tile + warp) * kTile + r) * rows + row];
  }
  return sum;
}

template <typename T>
__device__ __forceinline__ void write_result(const Arguments& p, const Segment& w, uint32_t o, int row, float value,
                                             float up, void* y) {
  if (w.bias != nullptr) value += to_float(static_cast<const T*>(w.bias)[o]);
  const uint64_t at = uint64_t(row) * p.y_width + w.y_begin + o;
  if (p.extras.activation != Activation::kNone) {
    const void* bias = p.segment[1].bias;
    if (bias != nullptr) up += to_float(static_cast<const T*>(bias)[o]);
    value = activate(value, p.extras.activation) * up;
  }
  write_value<T>(p.extras, at, value, y);
}

template <typename T>
__device__ __forceinline__ void write_tiles(const Arguments& p, const Shares& shares, const Work& work, void* y) {
  const uint32_t units = work.tiles / p.parts;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < units * kTile << p.row_bits; i += kThreads) {  // shifts: divisions take long
    const uint32_t r = i % kTile, row = i / kTile & ((1u << p.row_bits) - 1),
                   tile = (i / kTile >> p.row_bits) * p.parts;
    if (row >= uint32_t(p.rows)) continue;
    uint32_t number = tile;
    const Segment& w = place_of(p, work.unit, number);
    const float sum = sum_shares(shares, tile, r, row, p.rows);
    const float up = p.parts == 2 ? sum_shares(shares, tile + 1, r, row, p.rows) : 0.f;
    write_result<T>(p, w, number * kTile + r, row, sum, up, y);
  }
}

}  // namespace localq::int4
