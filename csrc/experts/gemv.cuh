// y = x W^T where W lies row by row in blocks that have a scale each, for W = one of many experts that is chosen on the
// device, or one to three matrices; x, bias and residual in f16 or bf16, sums in f32, rounded once. A Format says what
// 16 bytes of a row are.
//
// A tile is 16 rows of W, 8 "low" and 8 "high" ones: gates and ups of 8 pairs, 8 results of two experts with different
// x, or 16 results. It is the operand A of m16n8k16; lane (g, t) loads 16 bytes of low row g and of high row g, which
// are whole blocks, so that a block belongs to one lane. For its sum to come out by itself, column c of B is zero but
// where lane t = c % 4 multiplies: columns 0 to 3 are x of the low rows in blocks t = 0 to 3, columns 4 to 7 x of the
// high ones. Of the product, lanes with t < 2 hold two blocks' sums of low row g, the others two of high row g, and
// each multiplies them with their scales: two FFMA for 4 blocks of 16 rows. Eight of 32 lanes read x, all of it once.
//
// A block of threads owns consecutive units of results. Its warps have a run of the items of its tiles each (kSteps *
// 64 bytes of every row) and add up in registers as long as the tile is the same; then each leaves its share in shared
// memory, where they are added in the order of the items. Deterministic: every sum has one order, there are no atomics.
//
// Bound: memory. The first item of every warp is asked for as soon as its rows are known: before the launch that makes
// x has ended, or, of experts, when the choice is there. As in rows/gemv_kernel.cuh one block per multiprocessor, never
// two.
#pragma once

#include "common/block_loads.cuh"
#include "common/gemv.cuh"
#include "common/launch.h"
#include "common/mma.cuh"
#include "common/row_loads.cuh"
#include "experts/gemv_launch.h"

namespace localq {

constexpr int kBlockWarps = 16, kBlockThreads = 32 * kBlockWarps;
constexpr int kHalfTile = 8;         // low rows of a tile, and high ones
constexpr int kBlockStepBytes = 64;  // of a row: four lanes, 16 bytes each
constexpr uint32_t kTileRows = 2 * kHalfTile;

// The units of a block of threads.
struct UnitSpan {
  uint32_t begin, count, tiles;
};

__device__ __forceinline__ UnitSpan unit_span(const BlockGemv& p) {
  const uint32_t begin = uint64_t(p.units) * blockIdx.x / gridDim.x;
  const uint32_t count = uint32_t(uint64_t(p.units) * (blockIdx.x + 1) / gridDim.x) - begin;
  return {begin, count, count * p.parts};
}

// The expert of a slot; an index that is none is taken for the nearest that is one.
__device__ __forceinline__ uint32_t expert_of(const BlockGemv& p, uint32_t slot) {
  return uint32_t(min(max(p.chosen[slot], 0), int(p.experts) - 1));
}

// A row of W: its matrix, and its number there.
struct RowPlace {
  uint32_t matrix, row;
};

// Result `o` of matrices behind each other.
__device__ __forceinline__ RowPlace dense_place(const BlockGemv& p, uint32_t o) {
  uint32_t matrix = 0;
  while (o >= p.matrix[matrix].out) o -= p.matrix[matrix++].out;
  return {matrix, o};
}

// The row that gives gate (half 0) or up (half 1) of pair o of an expert.
__device__ __forceinline__ uint32_t pair_row(const BlockGemv& p, uint32_t o, uint32_t half) {
  return p.interleaved ? 2 * o + half : o + half * p.results;
}

// Where row g of the half of a tile lies; rows past the end repeat the last one. `part`: of the unit.
__device__ __forceinline__ RowPlace row_place(const BlockGemv& p, uint32_t unit, uint32_t part, uint32_t half,
                                              uint32_t g) {
  const uint32_t last = p.results - 1;
  switch (p.kind) {
    case BlockKind::kDense:
      return dense_place(p, min((2 * unit + half) * kHalfTile + g, last));
    case BlockKind::kPair:
      return {half, min(unit * kHalfTile + g, last)};
    case BlockKind::kGateUp: {
      const uint32_t o = min(unit % p.slot_units * kHalfTile + g, last);
      return {0, expert_of(p, unit / p.slot_units) * p.matrix[0].out + pair_row(p, o, half)};
    }
    default: {
      const uint32_t slot = min(2 * part + half, p.slots - 1);
      return {0, expert_of(p, slot) * p.matrix[0].out + min(unit * kHalfTile + g, last)};
    }
  }
}

constexpr int kNothing = -(1 << 20);

// The lane's part of a tile: its first 16 bytes of either row, bytes from there to the end of a row, and its scales:
// those of the row whose sums it will have.
struct LaneTile {
  const uint8_t *low, *high, *scale;
  int left;  // kNothing: no item

  template <typename Format>
  __device__ __forceinline__ LaneTile from(uint32_t steps) const {
    const uint32_t skipped = steps * kBlockStepBytes;
    return {low + skipped, high + skipped, scale + steps * Format::kScaleBytes, left - int(skipped)};
  }
};

template <typename Format>
__device__ __forceinline__ LaneTile lane_tile(const BlockGemv& p, const UnitSpan& span, uint32_t tile) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, skipped = 16 * t;
  const uint32_t unit = span.begin + tile / p.parts, part = tile % p.parts;
  const RowPlace low = row_place(p, unit, part, 0, g), high = row_place(p, unit, part, 1, g);
  const RowPlace own = t < 2 ? low : high;
  return {p.matrix[low.matrix].codes + uint64_t(low.row) * p.row_bytes + skipped,
          p.matrix[high.matrix].codes + uint64_t(high.row) * p.row_bytes + skipped,
          Format::scales(p, p.matrix[own.matrix].scales, own.row, t % 2), int(p.row_bytes) - int(skipped)};
}

// 16 bytes of either row, and the scales of the blocks whose sums the lane will have.
template <typename Format>
struct Step {
  uint4 low, high;
  typename Format::Scale scale;

  __device__ __forceinline__ void load(const BlockGemv& p, const LaneTile& item, int s) {
    low = load_weights(item.low + s * kBlockStepBytes, item.left, s * kBlockStepBytes);
    high = load_weights(item.high + s * kBlockStepBytes, item.left, s * kBlockStepBytes);
    // of the step's blocks, the lane has those that lanes t % 2 * 2 and the next one load
    const int t = threadIdx.x % 4, behind = 16 * (t - t % 2 * 2);
    scale = Format::load_scale(p, item.scale + s * Format::kScaleBytes, item.left + behind, s * kBlockStepBytes);
  }
};

// A warp's items among those of its block, which go through its tiles in order: number `first` to `end` - 1. Every warp
// has `each` of them, the last ones fewer.
struct ItemRun {
  uint32_t each, first, end;
};

__device__ __forceinline__ ItemRun item_run(const BlockGemv& p, const UnitSpan& span) {
  const uint32_t all = span.tiles * p.items, each = (all + kBlockWarps - 1) / kBlockWarps;
  const uint32_t first = min(threadIdx.x / 32 * each, all);
  return {each, first, min(first + each, all)};
}

// Shared memory of a block: the table of the format, what warps tell each other, 16-byte zeros, x, the tiles' shares
// and the biases of their rows.
struct BlockShared {
  uint8_t* table;
  float* scratch;        // [kBlockWarps]
  const uint8_t* zeros;  // of an item of x, where the format reads any
  uint8_t* x;
  float* shares;  // [tiles + kBlockWarps][kTileRows][rows of x]: of tile t the share of warp w is number t + w
  float* biases;  // [tiles][kTileRows]
};

// Floats of shares and biases.
__host__ __device__ constexpr uint32_t result_floats(uint32_t tiles, uint32_t rows) {
  return kTileRows * ((tiles + kBlockWarps) * rows + tiles);
}

// The zeros lie so that a lane that reads them and one that reads x, whose rows begin at multiples of 128, never meet
// in a bank.
constexpr uint32_t kZerosAt = 160;

template <typename Format>
__host__ __device__ constexpr uint32_t header_bytes() {  // before x
  return Format::kTableBytes + (Format::kHalfX ? 1024 : 4 * kBlockWarps);
}

template <typename Format>
__device__ __forceinline__ BlockShared carve(uint8_t* memory, const BlockGemv& p, uint32_t tiles) {
  static_assert(!Format::kHalfX || kZerosAt + Format::kSteps * 256 <= 1024, "an item of zeros fits before x");
  uint8_t* const x = memory + header_bytes<Format>();
  float* const shares = reinterpret_cast<float*>(x + p.x_rows * p.x_stride);
  return {memory, reinterpret_cast<float*>(memory + Format::kTableBytes), memory + kZerosAt, x,
          shares, shares + kTileRows * (tiles + kBlockWarps) * p.rows};
}

// Bias of row number i of the block's tiles.
template <typename T>
__device__ __forceinline__ float bias_at(const BlockGemv& p, const UnitSpan& span, uint32_t i) {
  if (!p.biased || i >= span.tiles * kTileRows) return 0.f;
  const uint32_t tile = i / kTileRows, unit = span.begin + tile / p.parts;
  const RowPlace place = row_place(p, unit, tile % p.parts, i / kHalfTile % 2, i % kHalfTile);
  const void* const of = p.matrix[place.matrix].bias;
  return of == nullptr ? 0.f : to_float(static_cast<const T*>(of)[place.row]);
}

// All of them to shared memory; `first` is that of number threadIdx.x, asked for before, so that x does not wait for
// it.
template <typename T>
__device__ __forceinline__ void stage_biases(const BlockGemv& p, const BlockShared& s, const UnitSpan& span,
                                             float first) {
  const uint32_t count = span.tiles * kTileRows;
  if (threadIdx.x < count) s.biases[threadIdx.x] = first;
  for (uint32_t i = threadIdx.x + kBlockThreads; i < count; i += kBlockThreads) s.biases[i] = bias_at<T>(p, span, i);
}

// Where the lane reads x of an item: in shared memory, zeros where its column of B is zero; or, of formats with x as it
// is, anywhere, and only as much as is left of W, nothing where the column is zero.
struct LaneX {
  uint32_t shared;
  const uint8_t* at;
  int left;
};

template <typename Format, typename T>
__device__ __forceinline__ LaneX lane_x(const BlockGemv& p, const BlockShared& s, const T* x, uint32_t tile,
                                        uint32_t item) {
  const uint32_t lane = threadIdx.x % 32, column = lane / 4, t = lane % 4;
  const uint32_t row = p.kind == BlockKind::kDown ? min(tile % p.parts * 2 + column / 4, p.slots - 1) : 0;
  const uint32_t skipped = item * Format::kSteps * kBlockStepBytes, begin = (16 * t + skipped) * Format::kXWords;
  const bool counts = column % 4 == t;
  if constexpr (Format::kHalfX) {
    return {shared_address(counts ? s.x + row * p.x_stride + begin : s.zeros), nullptr, 0};
  } else {
    const auto* where = reinterpret_cast<const uint8_t*>(x) + uint64_t(row) * p.in * sizeof(T);
    if (p.x_stride != 0) where = s.x + row * p.x_stride;
    return {0, where + begin, counts ? int(p.row_bytes) - int(16 * t + skipped) : 0};
  }
}

template <typename Format>
__device__ __forceinline__ void load_x_words(uint4 (&words)[Format::kXWords], const LaneX& x, int step) {
#pragma unroll
  for (int k = 0; k < Format::kXWords; ++k) {
    const int offset = step * kBlockStepBytes * Format::kXWords + 16 * k;
    words[k] = Format::kHalfX ? load_word(x.shared + offset) : load_x(x.at + offset, x.left, step * kBlockStepBytes);
  }
}

// The two block sums of the product that are the lane's.
__device__ __forceinline__ float2 own_sums(const float (&c)[4]) {
  return threadIdx.x % 4 < 2 ? make_float2(c[0], c[1]) : make_float2(c[2], c[3]);
}

// The warp's items; the ring holds the first of them, which is `next`.
template <typename Format, typename T>
__device__ __forceinline__ void sum_run(const BlockGemv& p, const BlockShared& s, const UnitSpan& span, const T* x,
                                        const ItemRun& run, LaneTile next, Step<Format> (&ring)[Format::kSteps]) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t tile = run.first / p.items, item = run.first % p.items;
  float sum = 0.f;
#pragma unroll 1
  for (uint32_t left = run.end - run.first; left > 0; --left) {
    const LaneX from = lane_x<Format>(p, s, x, tile, item);
    const bool ends = ++item == p.items || left == 1;
    next = next.template from<Format>(Format::kSteps);
    if (left == 1) {
      next.left = kNothing;
    } else if (ends) {
      next = lane_tile<Format>(p, span, tile + 1);
    }
#pragma unroll
    for (int i = 0; i < Format::kSteps; ++i) {
      uint4 words[Format::kXWords];
      load_x_words<Format>(words, from, i);
      float c[4] = {};
      Format::multiply(c, s.table, ring[i].low, ring[i].high, words);
      sum = Format::add(p, s.table, sum, own_sums(c), ring[i].scale);
      ring[i].load(p, next, i);
    }
    if (!ends) continue;
    sum += __shfl_xor_sync(~0u, sum, 1);
    if (lane % 2 == 0) s.shares[(tile + warp) * kTileRows + lane % 4 * 4 + lane / 4] = sum;
    sum = 0.f, item = 0, ++tile;
  }
}

// What row `r` of a tile (low rows, then high ones) gives with row `row` of x: `scale` times the sum of its shares in
// the order of its items, and its bias.
__device__ __forceinline__ float row_result(const BlockGemv& p, const BlockShared& s, const ItemRun& run, uint32_t tile,
                                            uint32_t r, float scale, uint32_t row = 0) {
  const uint32_t first = tile * p.items / run.each, last = (tile * p.items + p.items - 1) / run.each;
  const float* share = s.shares + (tile * kTileRows + r) * p.rows + row;
  float sum = 0.f;
#pragma unroll 4
  for (uint32_t warp = first; warp <= last; ++warp) sum += share[warp * kTileRows * p.rows];
  return sum * scale + s.biases[tile * kTileRows + r];
}

}  // namespace localq
