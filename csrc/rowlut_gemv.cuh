// The kernel of rowlut_gemv.cu: a warp over its items, tables and x in bytes.
#pragma once

#include "rowlut_table.cuh"
#include "rowlut_x.cuh"

namespace localq::rowlut {

// Of so many tiles of B. One leaves registers for twice the warps, which took a tenth less time (README.md).
template <int kTiles>
constexpr int kWarps = kTiles == 1 ? 16 : 8;
template <int kTiles>
constexpr int kSteps = kTiles == 1 ? 4 : 6;  // loads of a row in an item; all of one item are in flight
template <int kTiles>
constexpr uint32_t kItemBytes = kSteps<kTiles> * kStepBytes;
constexpr uint32_t kXPad = 16;  // bytes of a plane beyond 128: lanes of two rows of B then meet no bank twice

struct RowLutGemv {
  RowGemv row;
  const __half* values[kMaxSegments];  // [out][16]
  uint32_t most;                       // results of a block, at most
};

// How many columns of B there are: kTiles of 8. One: plane and row of x, 2 plane + row, for up to 2 rows. Three: one of
// each plane, for up to 8 rows.
template <int kTiles>
__device__ constexpr bool kTogether = kTiles == 1;
// What a warp leaves of a row of W and one of x: each plane by itself where lanes have one each, else their sum.
template <int kTiles>
constexpr int kSlots = kTiles == 1 ? kPlanes : 1;

// Entries 0 to 7, then 8 to 15, of rows g and g + 8 of a tile, as bytes of H and of L.
struct LaneTables {
  uint32_t word[2][2][4];  // [g, g + 8][H, L]
};

// The lane's rows of the block's tables: results of the block, with an activation the up's behind the gate's.
__device__ __forceinline__ LaneTables lane_tables(const RowGemv& p, const Span& span, const Tables& tables,
                                                  uint32_t tile) {
  const uint32_t count = span.end - span.begin, first = tile * p.span + threadIdx.x % 32 / 4;
  const bool paired = p.span != kRowTile;
  const uint32_t low = min(first, count - 1), high = paired ? count + low : min(first + 8, count - 1);
  const uint32_t row[2] = {low, high};
  LaneTables found;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int digit = 0; digit < 2; ++digit) {
      const uint4 bytes = tables.bytes[2 * row[r] + digit];
      found.word[r][digit][0] = bytes.x, found.word[r][digit][1] = bytes.y;
      found.word[r][digit][2] = bytes.z, found.word[r][digit][3] = bytes.w;
    }
  }
  return found;
}

// The half row that is this thread's in a round of `fill_tables`; past the end the last one.
__device__ __forceinline__ HalfRow half_row(const RowLutGemv& p, const Span& span, uint32_t task, uint32_t rows) {
  const uint32_t count = span.end - span.begin, at = min(task / 2, rows - 1);
  uint32_t o = span.begin + (at < count ? at : at - count), segment = at < count ? 0 : 1;
  if (p.row.span == kRowTile) {
    while (o >= p.row.segment[segment].out) o -= p.row.segment[segment++].out;
  }
  return load_half(p.values[segment], o, task % 2);
}

// All tables of a block's results. What the next round makes is under way in each.
__device__ __forceinline__ void fill_tables(const RowLutGemv& p, const Span& span, const Tables& tables) {
  const uint32_t count = span.end - span.begin, rows = p.row.span == kRowTile ? count : 2 * count;
  const uint32_t rounds = (2 * rows + blockDim.x - 1) / blockDim.x;
  HalfRow next = half_row(p, span, threadIdx.x, rows);
#pragma unroll 1
  for (uint32_t round = 0; round < rounds; ++round) {
    const uint32_t task = round * blockDim.x + threadIdx.x;
    const HalfRow now = next;
    next = half_row(p, span, task + blockDim.x, rows);
    fill_row(tables, min(task / 2, rows - 1), now, task % 2, task / 2 < rows);
  }
}

// Sums of the lane's results: [H, L][columns of B][rows g and g + 8, columns 2 t and 2 t + 1].
template <int kTiles>
using Sums = int[2][kTiles][4];

// Eight codes of each of the lane's rows times x of the same columns.
template <int kTiles>
__device__ __forceinline__ void multiply_word(Sums<kTiles>& sum, const LaneTables& tables, uint32_t low, uint32_t high,
                                              const uint32_t (&x)[kTiles][2]) {
  const uint32_t codes[2][2] = {{low, high}, {low ^ 0x88888888u, high ^ 0x88888888u}};
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {  // entries 0 to 7, 8 to 15
#pragma unroll
    for (int digit = 0; digit < 2; ++digit) {
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t (&words)[4] = tables.word[i % 2][digit];
        a[i] = select_bytes(words[2 * upper], words[2 * upper + 1], codes[upper][i % 2] >> (i / 2 * 16));
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) mma(sum[digit][tile], a, x[tile][0], x[tile][1]);
    }
  }
}

// Where the lane reads its columns of B, plane by plane of three: x of columns 32 t of a step on.
struct Planes {
  uint32_t at;      // address in shared memory
  uint32_t stride;  // from tile to tile of B
  int left;         // as in LaneRows, in bytes of W
};

template <int kTiles>
__device__ __forceinline__ Planes planes_of_lane(const RowGemv& p, const uint8_t* planes) {
  const uint32_t g = threadIdx.x % 32 / 4, skipped = threadIdx.x % 4 * 16;
  const uint32_t row = kTogether<kTiles> ? g % 2 : g, plane = kTogether<kTiles> ? g / 2 : 0;
  const bool there = row < uint32_t(p.rows) && plane < kPlanes;
  const uint32_t from = address_in_shared(planes) + (there ? row * kPlanes + plane : 0) * p.x_stride;
  return {from + 2 * skipped, p.x_stride, there ? int(p.row_bytes) - int(skipped) : 0};
}

// A step of an item: 32 columns of the lane's two rows.
template <int kTiles>
__device__ __forceinline__ void multiply_step(Sums<kTiles>& sum, const LaneTables& tables, const uint4 (&codes)[2],
                                              const Planes& x, uint32_t item, int s) {
  const uint32_t lows[4] = {codes[0].x, codes[0].y, codes[0].z, codes[0].w};
  const uint32_t highs[4] = {codes[1].x, codes[1].y, codes[1].z, codes[1].w};
  const uint32_t at = x.at + 2 * (item * kItemBytes<kTiles> + s * kStepBytes);
  const int left = x.left - int(item * kItemBytes<kTiles>);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t b[2][kTiles][2];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const uint4 words = load_shared(at + tile * x.stride + 16 * half, left, s * kStepBytes);
      b[0][tile][0] = words.x, b[0][tile][1] = words.y, b[1][tile][0] = words.z, b[1][tile][1] = words.w;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) multiply_word<kTiles>(sum, tables, lows[2 * half + i], highs[2 * half + i], b[i]);
  }
}

// The warp's sums of a tile to its share, and zeros: rows g and g + 8 of the tile. Whole numbers, so what they add up
// to does not depend on how many warps and rows of x there are.
template <int kTiles>
__device__ __forceinline__ void leave_sums(int64_t* share, Sums<kTiles>& sum, int rows) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int64_t total = 0;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      total += (int64_t(kBase) * sum[0][tile][i] + sum[1][tile][i]) * (1 << 8 * tile);
      sum[0][tile][i] = sum[1][tile][i] = 0;
    }
    const int at = g + i / 2 * 8, row = (kTogether<kTiles> ? 0 : 2 * t) + i % 2;
    if (row >= rows || (kTogether<kTiles> && t >= kPlanes)) continue;
    share[(at * rows + row) * kSlots<kTiles> + (kTogether<kTiles> ? t : 0)] = total;
  }
}

// Row `r` of tile `tile` times row `row` of x, but for their scales.
template <int kTiles>
__device__ __forceinline__ float sum_of_shares(const RowGemv& p, const int64_t* tile_shares, uint32_t tile, uint32_t r,
                                               int row) {
  constexpr uint32_t kCount = kWarps<kTiles>;
  const uint32_t of_warp = kRowTile * p.rows * kSlots<kTiles>, first = tile * p.items % kCount;
  int64_t sum = 0;
  for (uint32_t i = 0; i < min(p.items, kCount); ++i) {
    const int64_t* const share = tile_shares + (first + i) % kCount * of_warp + (r * p.rows + row) * kSlots<kTiles>;
#pragma unroll
    for (int slot = 0; slot < kSlots<kTiles>; ++slot) sum += share[slot] * (1 << 8 * slot);
  }
  return float(sum);
}

// Writes the results of the tiles from `first` on, at most a group.
template <typename T, int kTiles>
__device__ __forceinline__ void write_tiles(const RowGemv& p, const Span& span, const int64_t* shares, uint32_t first,
                                            const Tables& tables, const float* d, void* y) {
  const uint32_t skipped = first * p.span, all = span.end - span.begin, count = min(p.group * p.span, all - skipped);
  const uint32_t of_tile = kWarps<kTiles> * kRowTile * p.rows * kSlots<kTiles>;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < count * p.rows; i += blockDim.x) {
    const uint32_t result = i % count, tile = result / p.span, r = result % p.span;
    const int row = i / count;
    const int64_t* const of = shares + tile * of_tile;
    const float* const scale = tables.scales + skipped + result;
    const float sum = sum_of_shares<kTiles>(p, of, first + tile, r, row) * scale[0] * d[row];
    float second = 0.f;
    if (p.span != kRowTile) {
      second = sum_of_shares<kTiles>(p, of, first + tile, r + p.span, row) * scale[all] * d[row];
    }
    write_result<T>(p, span.begin + skipped + result, row, sum, second, y);
  }
}

// All of the warp's items of a group of tiles; the ring holds that at the cursor, and is left with the one after.
template <int kTiles>
__device__ __forceinline__ void sum_tiles(const RowGemv& p, const Span& span, int64_t* shares, uint32_t first,
                                          const Tables& tables, const Planes& x, Cursor& cursor, LaneRows& next,
                                          uint4 (&ring)[kSteps<kTiles>][2]) {
  const uint32_t end = min(first + p.group, span.tiles);
  Sums<kTiles> sum = {};
  LaneTables mine = {};
  uint32_t of = ~0u;
#pragma unroll 1
  while (cursor.tile < end) {
    const Cursor now = cursor;
    if (of != now.tile) mine = lane_tables(p, span, tables, of = now.tile);
    cursor.advance(p.items, kWarps<kTiles>);
    next = cursor.tile == now.tile ? next.from(kWarps<kTiles> * kItemBytes<kTiles>)
                                   : lane_rows(p, span, cursor.tile).from(cursor.item * kItemBytes<kTiles>);
#pragma unroll
    for (int s = 0; s < kSteps<kTiles>; ++s) {
      multiply_step<kTiles>(sum, mine, ring[s], x, now.item, s);
      load_step(ring[s], next, s);
    }
    if (cursor.tile == now.tile) continue;
    const uint32_t at = (now.tile - first) * kWarps<kTiles> + threadIdx.x / 32;
    leave_sums<kTiles>(shares + at * kRowTile * p.rows * kSlots<kTiles>, sum, p.rows);
  }
}

// Shared memory: floats of the warps, d and largest of 8 rows of x, two sets of shares, tables, planes.
template <typename T, int kTiles>
__global__ void __launch_bounds__(32 * kWarps<kTiles>, 1)
    rowlut_gemv_kernel(const __grid_constant__ RowLutGemv p, const T* x, void* y) {
  const uint32_t set = p.row.group * kWarps<kTiles> * kRowTile * p.row.rows * kSlots<kTiles>;
  float* const scratch = reinterpret_cast<float*>(dynamic_memory());
  float* const d = scratch + kWarps<kTiles>;
  uint32_t* const largest = reinterpret_cast<uint32_t*>(d + 8);
  int64_t* const shares = reinterpret_cast<int64_t*>(d + 16);
  Tables tables;
  tables.bytes = reinterpret_cast<uint4*>(shares + 2 * set);
  tables.scales = reinterpret_cast<float*>(tables.bytes + 2 * p.most);
  uint8_t* const planes = reinterpret_cast<uint8_t*>(tables.scales + p.most);
  const Span span = span_of(p.row);
  const uint32_t warp = threadIdx.x / 32;
  Cursor cursor = {warp / p.row.items, warp % p.row.items};
  LaneRows item = lane_rows(p.row, span, cursor.tile).from(cursor.item * kItemBytes<kTiles>);
  uint4 ring[kSteps<kTiles>][2];
#pragma unroll
  for (int s = 0; s < kSteps<kTiles>; ++s) load_step(ring[s], item, s);
  if (threadIdx.x < 8) largest[threadIdx.x] = 0;
  fill_tables(p, span, tables);
  release_dependents();
  dependency_wait();
  __syncthreads();
  split_x(p.row, planes, d, largest, x, scratch);
  __syncthreads();
  const Planes source = planes_of_lane<kTiles>(p.row, planes);
#pragma unroll 1
  for (uint32_t first = 0, other = 0; first < span.tiles; first += p.row.group, other ^= set) {
    int64_t* const mine = shares + other;
    sum_tiles<kTiles>(p.row, span, mine, first, tables, source, cursor, item, ring);
    __syncthreads();
    write_tiles<T, kTiles>(p.row, span, mine, first, tables, d, y);
  }
}

}  // namespace localq::rowlut
