// Shared by the parts of bcq_gemv: the matrices of a launch, their split among blocks and warps, and the shared memory
// of a block. Tiles, units and stripes are those of lookup/gemv.cuh, in one slice: a block has whole rows.
#pragma once

#include "bcq/gemv.h"
#include "bcq/intrinsics.cuh"
#include "lookup/gemv.cuh"

namespace localq::bcq {

using vq::kThreads, vq::kTile, vq::kWarps;

constexpr uint32_t kColumns = 128;               // per block of columns: the sum of one product
constexpr uint32_t kWords = kColumns / 32;       // per row of a block, of signs
constexpr uint32_t kUnitBytes = kColumns * 2;    // per plane of a block of a tile: 16 rows of bits
constexpr uint32_t kScaleBytes = kTile * 2;      // per plane of a group of a tile
constexpr uint32_t kBits = 16;                   // per value of x
constexpr uint32_t kXBytes = kColumns * 2 + 32;  // per row of a block: bits, and the values of its four words

struct Arguments : vq::Arguments {
  // A tile has `planes` codes per column, and `layers` scales for each of its `groups` groups of columns: those of the
  // planes, and the zero point if there is one.
  uint32_t planes, layers, groups;
  uint32_t columns;           // blocks of columns
  uint32_t chunk;             // blocks of columns whose x is in shared memory at a time
  uint32_t split, split_log;  // warps per tile, a power of two
  uint32_t tile_codes;        // bytes per tile
  uint32_t tile_scales;
  uint32_t block_shift;  // groups of whole blocks: block >> block_shift is the group
  uint32_t word_shift;   // smaller groups: word >> word_shift is the group; else 31
  uint32_t zero;         // always zero
};

// The codes of a tile, and its scales.
struct Tile {
  const uint8_t* codes;
  const uint8_t* scales;
};

// Shared memory of a block.
//   tiles    [p.tiles]
//   x        [p.chunk][kRows][kXBytes] (activations.cuh)
//   shares   f32 [tile][p.split][row of the tile][row of x]
//   sums     f32 [tile][row of the tile][row of x]
//   scratch  f32 [kWarps]
struct Shared {
  Tile* tiles;
  uint8_t* x;
  float* shares;
  float* sums;
  float* scratch;
};

template <int kRows>
__host__ __device__ inline uint32_t shared_bytes(uint32_t tiles, uint32_t chunk, uint32_t split) {
  return tiles * uint32_t(sizeof(Tile)) + kRows * chunk * kXBytes + tiles * (split + 1) * kTile * kRows * 4 +
         kWarps * 4;
}

template <int kRows>
__device__ __forceinline__ Shared carve(uint8_t* memory, const Arguments& p) {
  Shared s;
  s.tiles = reinterpret_cast<Tile*>(memory);
  s.x = memory + p.tiles * sizeof(Tile);
  s.shares = reinterpret_cast<float*>(s.x + kRows * p.chunk * kXBytes);
  s.sums = s.shares + p.tiles * p.split * kTile * kRows;
  s.scratch = s.sums + p.tiles * kTile * kRows;
  return s;
}

// Fills in the addresses of the block's tiles, zeroes the partial sums, and prefetches the zero points, which are read
// last, to L2. Called by all threads; the block must synchronize afterwards.
template <int kRows>
__device__ __forceinline__ void fill(const Arguments& p, const vq::Span& span, const Shared& s) {
  for (uint32_t tile = threadIdx.x; tile < span.tiles; tile += kThreads) {
    const vq::Place place = vq::place_of(p, span, tile);
    const vq::Segment& w = p.segment[place.segment];
    const auto* const scales = static_cast<const uint8_t*>(w.group_scales) + uint64_t(place.tile) * p.tile_scales;
    s.tiles[tile] = {w.codes[0] + uint64_t(place.tile) * p.tile_codes, scales};
    for (uint32_t at = p.planes * p.groups * kScaleBytes; at < p.tile_scales; at += 128) prefetch_line(scales + at);
  }
  for (uint32_t i = threadIdx.x; i < span.tiles * p.split * kTile * kRows; i += kThreads) s.shares[i] = 0.f;
}

}  // namespace localq::bcq
