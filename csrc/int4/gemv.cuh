// int4_gemv: what a launch reads.
#pragma once

#include "common/tile_shares.cuh"
#include "int4/layout.cuh"

namespace localq::int4 {

constexpr int kWarps = 16, kThreads = 32 * kWarps;
constexpr int kChunk = 8;  // blocks per item; all of the next item are in flight
constexpr int kChunkColumns = kChunk * kBlock;
constexpr int kRowPad = 64;  // bytes between rows of x in shared memory, so that two rows use all banks

// One matrix of a launch.
struct Segment {
  const uint8_t* codes;
  const uint32_t* scales;  // of rows g and g + 8
  const uint8_t* zeros;
  const void* bias;
  uint32_t out, tiles;
  uint32_t y_begin;  // first column of its results
};

// A launch. A unit produces 16 results: one tile, or with an activation the tile of the gate and that of the up
// projection (`parts` = 2).
struct Arguments {
  Segment segment[kMaxSegments];
  GemvExtras extras;
  const uint16_t* order;
  uint32_t units_each, units_more;  // units per block, number of blocks with one more
  uint32_t parts, blocks, chunks;
  uint32_t groups;      // as stored
  uint32_t of_columns;  // the i-th run of kGroup columns is in group i * of_columns / 2^31
  uint32_t y_width;
  uint32_t x_stride;    // row stride of x in shared memory, in bytes; 0: x is read from global memory
  uint32_t most_tiles;  // per block
  int rows;
  uint32_t row_bits;  // log2 of rows, rounded up
  bool scales_bf16;
  static constexpr uint32_t warps = kWarps;
};

}  // namespace localq::int4
