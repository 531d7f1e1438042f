// What the parts of vq_gemv.cu share: the matrices of a launch, how they are cut among blocks of threads, and the
// memory of a block.
//
// A tile is 16 rows of a matrix, a unit is what ends in 16 results: a tile, or with an activation the gate's and the
// up's. A block has a stripe of units and a slice of the columns, and walks through steps: a step is one table, that is
// kPositions positions of one book, and all tiles of the stripe that share the book.
#pragma once

#include "gemv.cuh"
#include "launch.h"
#include "vq_gemv.h"

namespace localq::vq {

constexpr int kWarps = 16, kThreads = 32 * kWarps;
constexpr uint32_t kTile = 16;         // rows of a tile
constexpr uint32_t kGroup = 32;        // positions of one load of a warp (kRows = 8: twice 16)
constexpr uint32_t kEntryBytes = 256;  // of a table: what one code stands for, at all positions
constexpr uint32_t kTableBytes = 256 * kEntryBytes;
constexpr uint32_t kReach = 32;  // columns that a window may reach behind its slice
constexpr uint32_t kMostSlices = 8;

// Positions of a table for kRows rows of x: each takes 2 bytes a row.
template <int kRows>
__host__ __device__ constexpr uint32_t positions_of_table() {
  return kEntryBytes / 2 / kRows;
}

struct Book {
  uint32_t stride, steps, positions, before;
  uint32_t tile_bytes;
};

struct Segment {
  const uint8_t* codes[kMaxBooks];
  const uint4* fragments[kMaxBooks];
  const void* scales;
  const void* bias;
  float factor;
  uint32_t out, tiles;
  uint32_t y_begin;
};

struct Arguments {
  Segment segment[kMaxSegments];
  Book book[kMaxBooks];
  GemvExtras extras;
  uint32_t books, in, units, parts;
  uint32_t
      run_end[kMaxSegments];  // units behind the matrices that share codebooks; with two parts only their number counts
  uint32_t runs;
  uint32_t slices, slice_units, unit_columns;  // columns are cut between units of columns
  uint32_t tiles, x_stride, tables;            // of a block: most tiles, f16 of a row of x, tables in shared memory
  uint32_t y_width;
  int rows;
  bool scales_bf16, clusters;
  float* partials;  // [stripes][slices][tiles * 16 * kRows], only without clusters
  int* arrived;     // [stripes]
};

// What a block works on.
struct Span {
  uint32_t begin, count, tiles;       // units, and the tiles in them
  uint32_t column, columns_end;       // its slice; the end may lie behind the matrix
  uint32_t first_run, chunks, steps;  // chunks: tables of one run of matrices
};

struct Positions {
  uint32_t begin, end;
};

__device__ __forceinline__ Positions positions_of(const Arguments& p, const Span& span, uint32_t book) {
  const Book& b = p.book[book];
  return {span.column / b.stride, min(span.columns_end / b.stride, b.positions)};
}

template <int kRows>
__device__ __forceinline__ Span span_of(const Arguments& p) {
  const uint32_t slice = blockIdx.x % p.slices, stripe = blockIdx.x / p.slices, stripes = gridDim.x / p.slices;
  Span span = {};
  span.begin = uint64_t(p.units) * stripe / stripes;
  span.count = uint32_t(uint64_t(p.units) * (stripe + 1) / stripes) - span.begin;
  span.tiles = span.count * p.parts;
  span.column = p.slice_units * slice / p.slices * p.unit_columns;
  span.columns_end = p.slice_units * (slice + 1) / p.slices * p.unit_columns;
  for (uint32_t b = 0; b < p.books; ++b) {
    const Positions at = positions_of(p, span, b);
    span.chunks += (at.end - at.begin + positions_of_table<kRows>() - 1) / positions_of_table<kRows>();
  }
  uint32_t runs = p.runs;
  if (p.parts == 1) {
    while (p.run_end[span.first_run] <= span.begin) ++span.first_run;
    runs = 1;
    while (p.run_end[span.first_run + runs - 1] < span.begin + span.count) ++runs;
  }
  span.steps = runs * span.chunks;
  return span;
}

// A table and the tiles that it is for.
struct Step {
  uint32_t book, position, end;  // positions position .. end - 1
  uint32_t first, tiles;         // of the block's tiles
};

template <int kRows>
__device__ __forceinline__ Step step_at(const Arguments& p, const Span& span, uint32_t index) {
  Step step = {};
  if (index >= span.steps) return step;
  const uint32_t run = index / span.chunks;
  uint32_t chunk = index % span.chunks;
  Positions at = positions_of(p, span, 0);
  const uint32_t of_first = (at.end - at.begin + positions_of_table<kRows>() - 1) / positions_of_table<kRows>();
  if (chunk >= of_first) {
    chunk -= of_first, step.book = 1;
    at = positions_of(p, span, 1);
  }
  step.position = at.begin + chunk * positions_of_table<kRows>();
  step.end = min(step.position + positions_of_table<kRows>(), at.end);
  if (p.parts == 2) {
    step.first = run * span.count;
    step.tiles = p.runs == 1 ? span.tiles : span.count;
    return step;
  }
  const uint32_t r = span.first_run + run, end = span.begin + span.count;
  const uint32_t from = r == 0 ? span.begin : max(span.begin, p.run_end[r - 1]);
  step.first = from - span.begin;
  step.tiles = min(end, p.run_end[r]) - from;
  return step;
}

// Tile `tile` of the block: its matrix and its number there.
struct Place {
  uint32_t segment, tile;
};

__device__ __forceinline__ Place place_of(const Arguments& p, const Span& span, uint32_t tile) {
  if (p.parts == 2) return tile < span.count ? Place{0, span.begin + tile} : Place{1, span.begin + tile - span.count};
  Place place = {0, span.begin + tile};
  while (place.tile >= p.segment[place.segment].tiles) place.tile -= p.segment[place.segment++].tiles;
  return place;
}

// Shared memory of a block.
//   tables   [p.tables][256 codes][256 bytes]
//   codes    where the codes of a tile begin [book][tile]
//   x        f16 [kRows][p.x_stride]: the slice, times a power of two for each row
//   back     f32 [kRows]: one over that power;   largest u32 [kRows];   scratch f32 [kWarps]
//   sums     f32 [halves of a table][tile][row of the tile][row of x]
struct Shared {
  uint8_t* tables;
  const uint8_t** codes;
  __half* x;
  float* back;
  uint32_t* largest;
  float* scratch;
  float* sums;
};

template <int kRows>
__host__ __device__ constexpr uint32_t halves() {
  return kRows == 1 ? 2 : 1;
}

template <int kRows>
__host__ __device__ inline uint32_t shared_bytes(uint32_t tables, uint32_t x_stride, uint32_t tiles) {
  return tables * kTableBytes + kRows * x_stride * 2 + 4 * (2 * kRows + kWarps) +
         tiles * (8 * kMaxBooks + 4 * halves<kRows>() * kTile * kRows);
}

template <int kRows>
__device__ __forceinline__ Shared carve(uint8_t* memory, const Arguments& p) {
  Shared s;
  s.tables = memory;
  s.x = reinterpret_cast<__half*>(memory + p.tables * kTableBytes);
  s.codes = reinterpret_cast<const uint8_t**>(s.x + kRows * p.x_stride);
  s.back = reinterpret_cast<float*>(s.codes + kMaxBooks * p.tiles);
  s.largest = reinterpret_cast<uint32_t*>(s.back + kRows);
  s.scratch = reinterpret_cast<float*>(s.largest + kRows);
  s.sums = s.scratch + kWarps;
  return s;
}

// The number of the warp, known to be the same in all its lanes.
__device__ __forceinline__ uint32_t warp_number() {
  return __shfl_sync(~0u, threadIdx.x / 32, 0);
}

}  // namespace localq::vq
