// The kernel of gemv.cu: tile by tile, a warp over its columns of each.
#pragma once

#include "common/launch.h"
#include "common/mma.cuh"
#include "rowlut/activations.cuh"
#include "rowlut/codes.cuh"

namespace localq::rowlut {

constexpr int kProducts = 8;            // of a step
constexpr int kAhead = 4;               // products whose entries are under way
constexpr int kWords = kAhead / 2 + 1;  // of x, likewise

// Which table the lane looks up in: byte 0 is that of its entry among a code's, bytes 2 and 3 are 65,536 times the
// number of the table. So one PRMT makes all of an address but where the tables are, which is a part of the load.
struct Lookup {
  uint32_t tables, column;

  template <uint32_t kOffset>
  __device__ __forceinline__ uint32_t entry(uint32_t codes, int byte) const {
    uint32_t word[1];
    load_words<int(kOffset)>(word, tables + __byte_perm(codes, column, 0x7604u | uint32_t(byte) << 4));
    return word[0];
  }
};

// Sums of the lane's results, in two parts by turns: rows g and g + 8 of the tile, rows 2 t and 2 t + 1 of x.
using Sums = float[2][4];
using Operands = uint32_t[kWords][4];

// A step: 32 columns of the lane's two rows. Look-ups are kAhead products ahead of the products.
template <typename X>
__device__ __forceinline__ void multiply_step(Sums& sum, Operands& b, const Lookup& look, const uint4 (&codes)[2],
                                              const X& x, uint32_t step) {
  const uint32_t low[4] = {codes[0].x, codes[0].y, codes[0].z, codes[0].w};
  const uint32_t high[4] = {codes[1].x, codes[1].y, codes[1].z, codes[1].w};
  uint32_t a[kAhead][4];
#pragma unroll
  for (int n = 0; n < kProducts + kAhead; ++n) {
    if (n >= kAhead) {
      const int done = n - kAhead;
      const uint32_t (&word)[4] = b[done / 2 % kWords];
      mma(sum[done % 2], a[done % kAhead], word[done % 2 * 2], word[done % 2 * 2 + 1], __half{});
    }
    if (n >= kProducts) continue;
    if (n % 2 == 0) x.load(b[n / 2 % kWords], step, n / 2);
    uint32_t (&to)[4] = a[n % kAhead];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      to[2 * i] = look.entry<0>(low[n / 2], n % 2 * 2 + i);
      to[2 * i + 1] = look.entry<kHalfBytes>(high[n / 2], n % 2 * 2 + i);
    }
  }
}

// Asks for the batch from `step` on, behind which nothing else is under way: not before that of now is there, on which
// `zero`, which is zero, makes it depend.
template <int kNow>
__device__ __forceinline__ void load_next(const RowLutGemv& p, Codes& codes, uint32_t step) {
  uint32_t there = 0;
#pragma unroll
  for (uint32_t s = 0; s < kSteps; ++s) there |= codes.batch[kNow][s][0].x | codes.batch[kNow][s][1].x;
  load_batch(p, codes, codes.batch[1 - kNow], step, codes.end - int(step) + int(there & p.zero));
}

// A batch of a tile's columns, from `step` on. Where the next tile's values lie is found out between look-ups, when
// those of all warps keep shared memory busy. One path from load to load, for where two meet ptxas waits for what
// either has asked for.
template <int kNow, typename X>
__device__ __forceinline__ void sum_batch(const RowLutGemv& p, const Span& span, const Columns& columns, Sums& sum,
                                          Operands& b, const Lookup& look, const X& x, uint32_t tile, bool behind,
                                          uint32_t step, Codes& codes, Values& values) {
  const bool last = step + kSteps >= columns.end;
  if (last) go_to_tile(p, span, columns, tile + 1, behind, codes);
  load_next<kNow>(p, codes, last ? columns.begin : step + kSteps);
  if (step < columns.end) multiply_step(sum, b, look, codes.batch[kNow][0], x, step);
  if (step == columns.begin) load_values(p, span, tile + 1, behind, values);
  if (step + 1 < columns.end) multiply_step(sum, b, look, codes.batch[kNow][1], x, step + 1);
}

// The warp's columns of a tile; `values` are left with those of the next one.
template <typename X>
__device__ __forceinline__ void sum_tile(const RowLutGemv& p, const Span& span, const Columns& columns, Sums& sum,
                                         Operands& b, const Lookup& look, const X& x, uint32_t tile, Codes& codes,
                                         Values& values) {
  const bool behind = tile + 1 < codes.whole;
  uint32_t step = columns.begin;
#pragma unroll 1
  do {  // once without columns, too
    if (codes.now == 0) {
      sum_batch<0>(p, span, columns, sum, b, look, x, tile, behind, step, codes, values);
    } else {
      sum_batch<1>(p, span, columns, sum, b, look, x, tile, behind, step, codes, values);
    }
    codes.now ^= 1;
  } while ((step += kSteps) < columns.end);
}

// Sum of the shares of row `r` of a tile, in the order of its columns.
__device__ __forceinline__ float sum_of_shares(const RowLutGemv& p, const float* shares, uint32_t r, int row,
                                               int rows) {
  float sum = 0.f;
#pragma unroll 8
  for (uint32_t warp = 0; warp < p.warps; ++warp) sum += shares[(warp * kRowTile + r) * rows + row];
  return sum;
}

// Writes the results of `tiles` tiles from `first` on.
template <typename T>
__device__ __forceinline__ void write_tiles(const RowLutGemv& p, const Span& span, const float* shares, uint32_t first,
                                            uint32_t tiles, const uint32_t* largest, void* y) {
  const uint32_t width = p.row.span, begin = span.begin + first * width, count = min(tiles * width, span.end - begin);
  const uint32_t rows = p.row.rows;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < count * rows; i += blockDim.x) {
    const uint32_t result = i / rows, tile = result / width, r = result % width;
    const int row = int(i % rows);
    const float* const of = shares + tile * (p.warps * kRowTile * rows);
    const float back = scale_of(largest[row], T{}).back;
    const float sum = sum_of_shares(p, of, r, row, rows) * back;
    const float second = width != kRowTile ? sum_of_shares(p, of, r + width, row, rows) * back : 0.f;
    write_result<T>(p.row, begin + result, row, sum, second, y);
  }
}

// Shared memory: one or two tables, floats of the warps, the largest of 8 rows of x, two sets of shares, x.
struct Shared {
  uint8_t* tables;
  float* scratch;
  uint32_t* largest;
  float* shares;
  uint8_t* x;

  __device__ __forceinline__ explicit Shared(const RowLutGemv& p) : tables(shared_memory()) {
    scratch = reinterpret_cast<float*>(tables + (p.two ? 2 : 1) * kPairTableBytes);
    largest = reinterpret_cast<uint32_t*>(scratch + kMostWarps);
    shares = reinterpret_cast<float*>(largest + 8);
    x = reinterpret_cast<uint8_t*>(shares + 2 * p.row.group * p.warps * kRowTile * p.row.rows);
  }
};

// All tiles of the block, the first of which has its table.
template <typename T, typename X>
__device__ __forceinline__ void sum_tiles(const RowLutGemv& p, const Span& span, const Shared& s,
                                          const Columns& columns, const X& x, Codes& codes, Values& values, void* y) {
  const uint32_t tile_floats = p.warps * kRowTile * p.row.rows;
  Lookup look = {shared_address(shared_memory()), kept(threadIdx.x % 32 * 4)};
  Operands b = {};
  float* set = s.shares;
  uint32_t kept = 0;
#pragma unroll 1
  for (uint32_t tile = 0; tile < span.tiles; ++tile) {
    const bool last = tile + 1 == span.tiles;
    prefetch_tiles(p, span, tile + 2, tile + p.ahead);
    Sums sum = {};
    sum_tile(p, span, columns, sum, b, look, x, tile, codes, values);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[0][i] += sum[1][i];
    leave_share(set + kept * tile_floats + threadIdx.x / 32 * kRowTile * p.row.rows, sum[0], p.row.rows);
    if (!p.two) __syncthreads();
    look.column ^= p.two ? kPairTableBytes : 0;
    if (!last) fill_table(p, s.tables + (look.column & kPairTableBytes), values);
    __syncthreads();
    if (++kept != p.row.group && !last) continue;
    write_tiles<T>(p, span, set, tile + 1 - kept, kept, s.largest, y);
    kept = 0;
    set = set == s.shares ? s.shares + p.row.group * tile_floats : s.shares;
  }
}

template <typename T, bool kStaged>
__global__ void __launch_bounds__(kMostThreads, 1)  // and 128 registers: two blocks of half as many threads fit
    rowlut_gemv_kernel(const __grid_constant__ RowLutGemv p, const T* x, void* y) {
  const Shared s(p);
  const Span span = span_of(p);
  const Columns columns = columns_of_warp(p);
  Codes codes;
  go_to_tile(p, span, columns, 0, false, codes);
  load_batch(p, codes, codes.batch[0], columns.begin, codes.end - int(columns.begin));
  Values values;
  load_values(p, span, 0, false, values);
  prefetch_tiles(p, span, 1, 0);
  if (threadIdx.x < 8) s.largest[threadIdx.x] = 0;
  fill_table(p, s.tables, values);
  if (p.ahead > 1) prefetch_tiles(p, span, span.tiles, 1);
  release_dependents();
  dependency_wait();
  __syncthreads();
  stage<T, kStaged>(p, s.x, s.largest, x, s.scratch);
  __syncthreads();
  const XSource<T, kStaged> source(p, s.x, s.largest, x);
  sum_tiles<T>(p, span, s, columns, source, codes, values, y);
}

}  // namespace localq::rowlut
