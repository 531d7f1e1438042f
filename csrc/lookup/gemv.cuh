// What the parts of gemv.cu share: the matrices of a launch, how they are cut among blocks of threads, and the
// memory of a block.
//
// A tile is 16 rows of a matrix, a unit is what ends in 16 results: a tile, or with an activation the gate's and the
// up's. A block has a stripe of units and a slice of the columns, and walks through steps: a step is one table or two,
// that is positions of one book, and all tiles of the stripe that share the book.
#pragma once

#include "common/gemv.cuh"
#include "common/launch.h"
#include "lookup/gemv.h"
#include "lookup/intrinsics.cuh"

namespace localq::vq {

constexpr int kWarps = 16, kThreads = 32 * kWarps;
constexpr uint32_t kTile = 16;         // rows of a tile
constexpr uint32_t kGroup = 32;        // positions of one load of a warp (kRows = 8: twice 16)
constexpr uint32_t kEntryBytes = 256;  // of a table: what one code stands for, at all positions
constexpr uint32_t kTableBytes = 256 * kEntryBytes;
constexpr uint32_t kReach = 32;  // columns that a window may reach behind its slice
constexpr uint32_t kMostSlices = 32;
constexpr uint32_t kTogether = 16;  // of the slices of a result: sums that a thread reads at once

// Positions of a table for kRows rows of x: each takes 2 bytes a row.
template <int kRows>
__host__ __device__ constexpr uint32_t positions_of_table() {
  return kEntryBytes / 2 / kRows;
}

// Whether a step may have two tables: with few rows of x the loop over them costs more than the sums of an item taken
// together half as often.
template <int kRows>
constexpr bool kPairs = kRows >= 4;

struct Book {
  uint32_t stride, shift, steps, positions, before;  // stride = 1 << shift
  uint32_t tile_bytes;
};

// `parts` shares of `all`, as equal as they can be; divided by the host.
struct Shares {
  uint32_t each, more;  // the first `more` of them have one more

  __device__ __forceinline__ uint32_t begin(uint32_t part) const {
    return each * part + min(part, more);
  }
};

struct Segment {
  const uint8_t* codes[kMaxBooks];
  const uint4* fragments[kMaxBooks];
  const void* scales;
  const void* bias;
  float factor;
  uint32_t out, tiles;
  uint32_t y_begin;
  const void* group_scales;  // of bcq_gemv, in place of scales and factor
};

// The rotation of x (localq/quant/hadamard.py), none without signs; of one row of x.
struct Rotation {
  const uint8_t* signs;   // [in / 8]
  uint32_t block, reach;  // columns of a Hadamard block, and how many behind a slice its codewords need, in eights
  float scale;
};

struct Arguments {
  Segment segment[kMaxSegments];
  Book book[kMaxBooks];
  Rotation rotation;
  GemvExtras extras;
  uint32_t books, in, units, parts;
  uint32_t run_end[kMaxSegments];  // units behind each run of matrices that share codebooks; not with two parts
  uint32_t runs;
  // Columns are cut between units of columns. Either a slice has all books, or the first `apart` slices have the first
  // book alone and the others the second.
  uint32_t slices, apart;
  uint32_t inverse;  // of slices: 2^31 over it, rounded up
  uint32_t unit_columns[kMaxBooks];
  Shares stripe_share, slice_share[kMaxBooks];  // of units, and of units of columns among a book's slices
  // Of a block: most tiles and steps, f16 of a row of x, tables that there is room for, tables of a step at most.
  uint32_t tiles, steps, x_stride, tables, step_tables;
  uint32_t y_width;
  int rows;
  bool scales_bf16;
  uint32_t* meeting;  // [stripes][slices][tiles * 16 * kRows]
  // Of experts (experts_kernel.cuh), of which a block works on one: problems that share the device, how many of them
  // meet in a result, and where the block's begins among all stripes, or among all slices.
  uint32_t slots, met, first_stripe, first_slice;
  uint32_t own_bytes;  // of shared memory, for the block's own arguments
};

// n / p.slices, for n * p.slices below 2^31.
__device__ __forceinline__ uint32_t over_slices(const Arguments& p, uint32_t n) {
  return uint32_t(uint64_t(n) * p.inverse >> 31);
}
__device__ __forceinline__ uint32_t stripe_of(const Arguments& p) {
  return over_slices(p, blockIdx.x) - p.first_stripe;
}
__device__ __forceinline__ uint32_t slice_of(const Arguments& p) {
  return blockIdx.x - over_slices(p, blockIdx.x) * p.slices;
}

// What a block works on.
struct Span {
  uint32_t begin, count, tiles;      // units, and the tiles in them
  uint32_t column, columns_end;      // its slice; the end may lie behind the matrix
  uint32_t book, books_end;          // of the slice
  uint32_t first_run, runs, chunks;  // chunks: steps of one run of matrices
};

struct Positions {
  uint32_t begin, end;
};

__device__ __forceinline__ Positions positions_of(const Arguments& p, const Span& span, uint32_t book) {
  const Book& b = p.book[book];
  return {span.column >> b.shift, min(span.columns_end >> b.shift, b.positions)};
}

// How many steps these positions take.
template <int kRows>
__device__ __forceinline__ uint32_t steps_of(const Arguments& p, const Positions& at) {
  const uint32_t tables = (at.end - at.begin + positions_of_table<kRows>() - 1) / positions_of_table<kRows>();
  return kPairs<kRows> && p.step_tables == 2 ? (tables + 1) / 2 : tables;
}

// The columns of slice `slice`, and its books.
__device__ __forceinline__ void take_columns(const Arguments& p, uint32_t slice, Span& span) {
  span.books_end = p.books;
  if (p.apart != 0) {
    if (slice >= p.apart) span.book = 1, slice -= p.apart;
    span.books_end = span.book + 1;
  }
  span.column = p.slice_share[span.book].begin(slice) * p.unit_columns[span.book];
  span.columns_end = p.slice_share[span.book].begin(slice + 1) * p.unit_columns[span.book];
}

template <int kRows>
__device__ __forceinline__ Span span_of(const Arguments& p) {
  const uint32_t stripe = stripe_of(p);
  Span span = {};
  take_columns(p, slice_of(p) - p.first_slice, span);
  span.begin = p.stripe_share.begin(stripe);
  span.count = p.stripe_share.begin(stripe + 1) - span.begin;
  span.tiles = span.count * p.parts;
  for (uint32_t b = span.book; b < span.books_end; ++b) span.chunks += steps_of<kRows>(p, positions_of(p, span, b));
  span.runs = p.runs;
  if (p.parts == 1 && p.runs > 1) {
    while (p.run_end[span.first_run] <= span.begin) ++span.first_run;
    span.runs = 1;
    while (p.run_end[span.first_run + span.runs - 1] < span.begin + span.count) ++span.runs;
  }
  return span;
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

// Positions and the tiles that they are for.
struct alignas(16) Step {
  const uint4* fragments;                   // the codewords
  uint32_t codeword_steps, stride, window;  // window: column of the slice where that of the first position begins
  uint32_t position, most;                  // of a tile's codes: the first and the last
  uint32_t first, tiles;                    // of the block's tiles; no tiles: all steps are done
  uint32_t codes;                           // where the tiles are in Shared::codes

  // In its table `number` and behind it.
  template <int kRows>
  __device__ __forceinline__ uint32_t positions(uint32_t number) const {
    return most + 1 - position - positions_of_table<kRows>() * number;
  }
  template <int kRows>
  __device__ __forceinline__ bool two_tables() const {
    return kPairs<kRows> && positions<kRows>(0) > positions_of_table<kRows>();
  }
};

// The tiles of run `run` of the span: those of matrices that share codebooks.
__device__ __forceinline__ void take_tiles(const Arguments& p, const Span& span, uint32_t run, Step& step) {
  if (p.parts == 2) {
    step.first = run * span.count;
    step.tiles = p.runs == 1 ? span.tiles : span.count;
    return;
  }
  const uint32_t r = span.first_run + run, end = span.begin + span.count;
  const uint32_t from = r == 0 ? span.begin : max(span.begin, p.run_end[r - 1]);
  step.first = from - span.begin;
  step.tiles = min(end, p.run_end[r]) - from;
}

// Step `index` of the block.
template <int kRows>
__device__ __forceinline__ Step step_at(const Arguments& p, const Span& span, uint32_t index) {
  Step step = {};
  const uint32_t run = index / span.chunks;
  uint32_t chunk = index - run * span.chunks, book = span.book;
  if (run >= span.runs) return step;
  take_tiles(p, span, run, step);
  Positions at = positions_of(p, span, book);
  const uint32_t of_first = steps_of<kRows>(p, at), most = positions_of_table<kRows>() * p.step_tables;
  if (chunk >= of_first) {
    chunk -= of_first, book = 1;
    at = positions_of(p, span, 1);
  }
  const uint32_t begin = at.begin + chunk * most;
  const Book& b = p.book[book];
  step.fragments = p.segment[place_of(p, span, step.first).segment].fragments[book];
  step.codeword_steps = b.steps, step.stride = b.stride, step.window = begin * b.stride - span.column;
  step.position = b.before + begin, step.most = b.before + min(begin + most, at.end) - 1;
  step.codes = book * p.tiles + step.first;
  return step;
}

// Shared memory of a block.
//   tables   [p.tables][256 codes][256 bytes]
//   steps    [p.steps], the last without tiles
//   codes    where the codes of a tile begin [book][tile]
//   x        f16 [kRows][p.x_stride]: the slice, times a power of two for each row
//   back     f32 [kRows]: one over that power;   largest u32 [kRows];   scratch f32 [kWarps]
//   sums     f32 [tile][row of the tile][row of x]
struct Shared {
  uint8_t* tables;
  Step* steps;
  const uint8_t** codes;
  __half* x;
  float* back;
  uint32_t* largest;
  float* scratch;
  float* sums;
};

template <int kRows>
__host__ __device__ inline uint32_t shared_bytes(uint32_t tables, uint32_t steps, uint32_t x_stride, uint32_t tiles) {
  return tables * kTableBytes + steps * uint32_t(sizeof(Step)) + kRows * x_stride * 2 + tiles * 8 * kMaxBooks +
         4 * (2 * kRows + kWarps + tiles * kTile * kRows);
}

template <int kRows>
__device__ __forceinline__ Shared carve(uint8_t* memory, const Arguments& p) {
  Shared s;
  s.tables = memory;
  s.steps = reinterpret_cast<Step*>(memory + p.tables * kTableBytes);
  s.x = reinterpret_cast<__half*>(s.steps + p.steps);
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
