// The kernel of rowlut_gemv.cu: tile by tile, a warp over its columns of each.
#pragma once

#include "launch.h"
#include "rowlut_table.cuh"
#include "rowlut_x.cuh"

namespace localq::rowlut {

// Steps of a batch, 64 bytes of every row of a tile each, 64 codes a lane. One batch is under way while another is
// multiplied: ptxas gives all loads of codes one scoreboard, so what waits for one batch waits for all that is under
// way, and none may have been asked for late.
constexpr uint32_t kSteps = 2;
constexpr uint32_t kBatchBytes = kSteps * kStepBytes;
constexpr int kProducts = 8;            // of a step
constexpr int kAhead = 4;               // products whose entries are under way
constexpr int kWords = kAhead / 2 + 1;  // of x, likewise

// The steps of every tile that are the warp's.
struct Columns {
  uint32_t begin, count;
};

__device__ __forceinline__ Columns columns_of_warp(const RowLutGemv& p) {
  const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // so that ptxas knows that a warp agrees on them
  const uint32_t begin = p.steps * warp / p.warps;
  return {begin, p.steps * (warp + 1) / p.warps - begin};
}

// The lane's codes of a tile from the warp's first step on, and bytes from there to the end of the warp's steps.
__device__ __forceinline__ LaneRows first_item(const RowLutGemv& p, const Span& span, const Columns& columns,
                                               uint32_t tile) {
  LaneRows item = lane_rows(p.row, span, tile).from(columns.begin * kStepBytes);
  const int warps = int((columns.begin + columns.count) * kStepBytes), row = int(p.row.row_bytes);
  if (tile < span.tiles) item.left += min(warps, row) - row;
  return item;
}

// Into L2, the values of one tile and the codes of another: two lanes' business, of another warp for each tile. Eight
// rows lie behind each other; where a matrix ends among them, those of the next one are not asked for.
__device__ __forceinline__ void prefetch_tiles(const RowLutGemv& p, const Span& span, uint32_t values, uint32_t codes) {
  if (threadIdx.x / 32 != values % p.warps || threadIdx.x % 32 > 1) return;
  if (values < span.tiles) {
    const Row row = row_of(p, span, values, 0, threadIdx.x % 32);
    const uint32_t rows = min(8u, p.row.segment[row.segment].out - row.o);
    prefetch_bytes(p.values[row.segment] + uint64_t(row.o) * 16, rows * 32);
  }
  if (p.ahead > 0 && codes < span.tiles) {
    const Row row = row_of(p, span, codes, 0, threadIdx.x % 32);
    const uint32_t rows = min(8u, p.row.segment[row.segment].out - row.o), of_row = p.row.row_bytes;
    prefetch_bytes(p.row.segment[row.segment].rows + uint64_t(row.o) * of_row, rows * of_row);
  }
}

// Which table the lane looks up in: byte 0 is that of its entry among a code's, bytes 2 and 3 are 65,536 times the
// number of the table. So one PRMT makes all of an address but where the tables are, which is a part of the load.
struct Lookup {
  uint32_t tables, column;

  template <uint32_t kOffset>
  __device__ __forceinline__ uint32_t entry(uint32_t codes, int byte) const {
    uint32_t word[1];
    vq::load_words<int(kOffset)>(word, tables + __byte_perm(codes, column, 0x7604u | uint32_t(byte) << 4));
    return word[0];
  }
};

// Sums of the lane's results, in two parts by turns: rows g and g + 8 of the tile, rows 2 t and 2 t + 1 of x.
using Sums = float[2][4];
using Operands = uint32_t[kWords][4];

// The warp's codes: the batch that is multiplied and the one under way, where that is from, where the next tile's are.
struct Codes {
  uint4 batch[2][kSteps][2];
  uint32_t now;  // 0 or 1
  LaneRows item, next;
};

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

// Asks for the next batch, behind which nothing else is under way: not before that of now is there, on which `zero`,
// which is zero, makes it depend.
template <int kNow>
__device__ __forceinline__ void load_next(Codes& codes, uint32_t zero) {
  uint32_t there = 0;
#pragma unroll
  for (uint32_t s = 0; s < kSteps; ++s) there |= codes.batch[kNow][s][0].x | codes.batch[kNow][s][1].x;
  LaneRows item = codes.item;
  item.left += int(there & zero);
#pragma unroll
  for (uint32_t s = 0; s < kSteps; ++s) load_step(codes.batch[1 - kNow][s], item, s);
}

// A batch of a tile's columns, from the warp's step `done` on. Where the next tile and its values lie is found out
// between look-ups, when those of all warps keep shared memory busy. One path from load to load, for where two meet
// ptxas waits for what either has asked for.
template <int kNow, typename X>
__device__ __forceinline__ void sum_batch(const RowLutGemv& p, const Span& span, const Columns& columns, Sums& sum,
                                          Operands& b, const Lookup& look, const X& x, uint32_t tile, uint32_t done,
                                          Codes& codes, Values& values) {
  const uint32_t left = columns.count - done, step = columns.begin + done;
  codes.item = left > kSteps ? codes.item.from(kBatchBytes) : codes.next;
  load_next<kNow>(codes, p.zero);
  if (left > 0) multiply_step(sum, b, look, codes.batch[kNow][0], x, step);
  if (done == 0) values = load_values(p, span, tile + 1);
  if (left <= kSteps) codes.next = first_item(p, span, columns, tile + 2);
  if (left > 1) multiply_step(sum, b, look, codes.batch[kNow][1], x, step + 1);
}

// The warp's columns of a tile; `values` are left with those of the next one.
template <typename X>
__device__ __forceinline__ void sum_tile(const RowLutGemv& p, const Span& span, const Columns& columns, Sums& sum,
                                         Operands& b, const Lookup& look, const X& x, uint32_t tile, Codes& codes,
                                         Values& values) {
  uint32_t done = 0;
#pragma unroll 1
  do {  // once without columns, too
    if (codes.now == 0) {
      sum_batch<0>(p, span, columns, sum, b, look, x, tile, done, codes, values);
    } else {
      sum_batch<1>(p, span, columns, sum, b, look, x, tile, done, codes, values);
    }
    codes.now ^= 1;
  } while ((done += kSteps) < columns.count);
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

  __device__ __forceinline__ explicit Shared(const RowLutGemv& p) : tables(dynamic_memory()) {
    scratch = reinterpret_cast<float*>(tables + (p.two ? 2 : 1) * kPairTableBytes);
    largest = reinterpret_cast<uint32_t*>(scratch + kMostWarps);
    shares = reinterpret_cast<float*>(largest + 8);
    x = reinterpret_cast<uint8_t*>(shares + 2 * p.row.group * p.warps * kRowTile * p.row.rows);
  }
};

// All tiles of the block, the first of which has its table.
template <typename T, typename X>
__device__ __forceinline__ void sum_tiles(const RowLutGemv& p, const Span& span, const Shared& s,
                                          const Columns& columns, const X& x, Codes& codes, void* y) {
  const uint32_t tile_floats = p.warps * kRowTile * p.row.rows, lane = kept(threadIdx.x % 32 * 4);
  Values values = {};
  Operands b = {};
  float* set = s.shares;
  uint32_t kept = 0;
#pragma unroll 1
  for (uint32_t tile = 0; tile < span.tiles; ++tile) {
    const bool last = tile + 1 == span.tiles;
    const uint32_t number = p.two ? tile % 2 : 0;
    const Lookup look = {address_in_shared(dynamic_memory()), lane | number << 16};
    prefetch_tiles(p, span, tile + 2, tile + p.ahead);
    Sums sum = {};
    sum_tile(p, span, columns, sum, b, look, x, tile, codes, values);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[0][i] += sum[1][i];
    leave_share(set + kept * tile_floats + threadIdx.x / 32 * kRowTile * p.row.rows, sum[0], p.row.rows);
    if (!p.two) __syncthreads();
    if (!last) fill_table(p, s.tables + (p.two ? number ^ 1 : 0) * kPairTableBytes, values);
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
  const Span span = span_of(p.row);
  const Columns columns = columns_of_warp(p);
  Codes codes;
  codes.now = 0, codes.item = first_item(p, span, columns, 0), codes.next = first_item(p, span, columns, 1);
#pragma unroll
  for (uint32_t i = 0; i < kSteps; ++i) load_step(codes.batch[0][i], codes.item, i);
  const Values values = load_values(p, span, 0);
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
  sum_tiles<T>(p, span, s, columns, source, codes, y);
}

}  // namespace localq::rowlut
