// What the parts of bcq_gemv share: the matrices of a launch, how they are cut among blocks of threads and warps, and
// the memory of a block. Tiles, units and stripes are those of lookup/gemv.cuh, in one slice: a block has whole rows.
#pragma once

#include "bcq/gemv.h"
#include "bcq/intrinsics.cuh"
#include "lookup/gemv.cuh"

namespace localq::bcq {

using vq::kThreads, vq::kTile, vq::kWarps;

constexpr uint32_t kColumns = 128;               // of a block of columns: what one product of bits adds up
constexpr uint32_t kWords = kColumns / 32;       // of a row of it, of signs
constexpr uint32_t kUnitBytes = kColumns * 2;    // of a plane of a tile's block: 16 rows of bits
constexpr uint32_t kScaleBytes = kTile * 2;      // of a plane of a tile's group
constexpr uint32_t kBits = 16;                   // that a value of x has
constexpr uint32_t kXBytes = kColumns * 2 + 32;  // of a row's block: bits, and what each of its four words counts

struct Arguments : vq::Arguments {
  // A tile has `planes` codes for each column, and `layers` scales for each of its `groups` groups of columns: those of
  // the planes, and the zero point where there is one.
  uint32_t planes, layers, groups;
  uint32_t columns;           // blocks of columns
  uint32_t chunk;             // blocks of columns whose x is in shared memory at a time
  uint32_t split, split_log;  // warps that share a tile: a power of two
  uint32_t tile_codes;        // bytes of a tile
  uint32_t tile_scales;
  uint32_t block_shift;  // a block's group is block >> block_shift, where a group has whole blocks
  uint32_t word_shift;   // a word's is word >> word_shift, where it has less; else 31
  uint32_t zero;         // is zero
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

// Where the block's tiles are, and shares of zero; zero points, which are read last, are asked for into L2. All
// threads; then synchronise.
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
