// What the products of one row (gemv.cu) and of 2 to 8 rows (gemv_rows.cu) share: the matrices of a launch cut
// into tiles of 16 rows, how a lane reads codes and scales of them, and the epilogue.
#pragma once

#include "common/gemv.cuh"
#include "common/launch.h"
#include "nf4/intrinsics.cuh"
#include "nf4/layout.cuh"
#include "nf4/mma.cuh"

namespace localq {

constexpr int kTile = 16;       // rows of a tile
constexpr int kChunk = 8;       // blocks of 64 columns that one lane's word of absmax codes covers
constexpr int kMostWarps = 24;  // of a block of any of the kernels
constexpr int kTileWords = 32;  // 16-byte words of a block of a tile

// One matrix of a launch.
struct Nf4Segment {
  const uint8_t* codes;
  const void* absmax;
  const float* nested_absmax;
  const void* bias;
  float offset;
  uint32_t out, tiles;  // rows, and tiles of them; the last may be short
  uint32_t y_begin;     // first column of its results
  bool tiled;
};

// A launch. A unit is what ends in 16 results: one tile, or with an activation the gate's and the up's (`parts` = 2).
struct Nf4Gemv {
  Nf4Segment segment[kMaxSegments];
  GemvExtras extras;
  const float *code_map, *nested_map;  // nested_map is null where absmax is stored in f32
  uint32_t units, parts, blocks, chunks;
  uint32_t y_width;
};

// A tile: its matrix and its number there, in one word.
struct TilePlace {
  uint32_t word;

  __device__ __forceinline__ uint32_t segment() const {
    return word >> 30;
  }
  __device__ __forceinline__ uint32_t tile() const {
    return word & ((1u << 30) - 1);
  }
};

constexpr TilePlace kNowhere = {~0u};

__device__ __forceinline__ TilePlace place_of(const Nf4Gemv& p, uint32_t unit, uint32_t part) {
  if (p.parts == 2) return {part << 30 | unit};
  uint32_t segment = 0;
  while (unit >= p.segment[segment].tiles) unit -= p.segment[segment++].tiles;
  return {segment << 30 | unit};
}

__device__ __forceinline__ bool is_full(const Nf4Segment& w, uint32_t tile) {
  return (tile + 1) * kTile <= w.out;
}

// Block `block` of the lane's two rows of a tile, in either order; rows past the end repeat the last one.
__device__ __forceinline__ uint4 load_codes(const Nf4Segment& w, uint32_t tile, uint32_t block, uint32_t blocks) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  if (w.tiled && is_full(w, tile)) {
    return __ldcs(reinterpret_cast<const uint4*>(w.codes) + (uint64_t(tile) * blocks + block) * kTileWords + lane);
  }
  const uint32_t low = min(tile * kTile + g, w.out - 1), high = min(tile * kTile + g + 8, w.out - 1);
  const auto* rows = reinterpret_cast<const uint2*>(w.codes);  // a block of a row is four of them
  const uint2 a = __ldcs(rows + (uint64_t(low) * blocks + block) * 4 + t);
  const uint2 b = __ldcs(rows + (uint64_t(high) * blocks + block) * 4 + t);
  return make_uint4(a.x, a.y, b.x, b.y);
}

// The scale of row `row` (0 to 15) of a tile in block `block`, in either order, straight from memory.
__device__ __forceinline__ float load_scale(const Nf4Gemv& p, const Nf4Segment& w, uint32_t tile, uint32_t row,
                                            uint32_t block) {
  const uint32_t flat = min(tile * kTile + row, w.out - 1) * p.blocks + block;
  uint32_t at = flat;
  if (w.tiled && is_full(w, tile)) {
    const uint32_t first = block / kChunk * kChunk, n = p.blocks - first, u = block - first;
    const uint32_t whole = (4 * (row % 8) + u / 2) * 4 + row / 8 * 2 + u % 2;
    at = (tile * p.blocks + first) * kTile + (n >= kChunk ? whole : row * n + u);
  }
  if (p.nested_map == nullptr) return static_cast<const float*>(w.absmax)[at];
  const float absmax = p.nested_map[static_cast<const uint8_t*>(w.absmax)[at]];
  return __fadd_rn(__fmul_rn(absmax, w.nested_absmax[flat / kNestedBlock]), w.offset);
}

// What a block keeps of its tiles in shared memory, so that no item has to wait for it: places, and for each tile the
// nested absmax that it can touch.
struct TileTable {
  uint32_t* range;    // the first unit, and the number of tiles
  TilePlace* places;  // [tiles + kMostWarps]: behind the tiles kNowhere, which ends the walk of a warp
  float* nested;      // [tiles][stride]
  uint32_t stride;

  static __host__ __device__ uint32_t stride_of(uint32_t blocks) {
    return blocks / 16 + 2;
  }
  static __host__ __device__ uint32_t bytes(uint32_t tiles, uint32_t blocks) {
    return 4 * (2 + tiles + kMostWarps + tiles * stride_of(blocks));
  }
  __device__ __forceinline__ TileTable(uint8_t* memory, uint32_t tiles, uint32_t blocks)
      : range(reinterpret_cast<uint32_t*>(memory)),
        places(reinterpret_cast<TilePlace*>(range + 2)),
        nested(reinterpret_cast<float*>(range + 2) + tiles + kMostWarps),
        stride(stride_of(blocks)) {
  }
};

// Number i of the nested absmax of the tiles of a block, and the place of the tile it belongs to.
__device__ __forceinline__ float nested_at(TilePlace& place, const Nf4Gemv& p, uint32_t stride, uint32_t unit,
                                           uint32_t i) {
  const uint32_t tile = i / stride, k = i % stride;
  place = place_of(p, unit + tile / p.parts, tile % p.parts);
  if (p.nested_map == nullptr) return 0.f;
  const Nf4Segment& w = p.segment[place.segment()];
  const uint32_t last = (w.out * p.blocks - 1) / kNestedBlock;
  return w.nested_absmax[min(place.tile() * kTile * p.blocks / kNestedBlock + k, last)];
}

// Fills the table with all threads; `nested` and `place` are nested_at(.., threadIdx.x), loaded before.
__device__ __forceinline__ void fill_tiles(const TileTable& table, const Nf4Gemv& p, uint32_t unit, uint32_t tiles,
                                           float nested, TilePlace place) {
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < tiles * table.stride; i += blockDim.x) {
    if (i != threadIdx.x) nested = nested_at(place, p, table.stride, unit, i);
    table.nested[i] = nested;
    if (i % table.stride == 0) table.places[i / table.stride] = place;
  }
  if (threadIdx.x == 0) table.range[0] = unit, table.range[1] = tiles;
  if (threadIdx.x < kMostWarps) table.places[tiles + threadIdx.x] = kNowhere;
}

// Result `o` of row `row` of x: what is added to the sum, and the one rounding. `second` is up's sum with an
// activation.
template <typename T>
__device__ __forceinline__ void write_result(const Nf4Gemv& p, TilePlace place, uint32_t o, uint32_t row, float sum,
                                             float second, void* y) {
  const Nf4Segment& w = p.segment[place.segment()];
  float value = sum * (1.f / kTableScale<T>);
  if (w.bias != nullptr) value += to_float(static_cast<const T*>(w.bias)[o]);
  const uint64_t at = uint64_t(row) * p.y_width + w.y_begin + o;
  if (p.extras.activation != Activation::kNone) {
    float up = second * (1.f / kTableScale<T>);
    const void* bias = p.segment[1].bias;
    if (bias != nullptr) up += to_float(static_cast<const T*>(bias)[o]);
    value = activate(value, p.extras.activation) * up;
  }
  write_value<T>(p.extras, at, value, y);
}

}  // namespace localq
