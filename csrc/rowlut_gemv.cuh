// The kernel of rowlut_gemv.cu: a warp over its items, tables and x in bytes.
#pragma once

#include "rowlut_table.cuh"
#include "rowlut_x.cuh"

namespace localq::rowlut {

constexpr int kSteps = 6;  // loads of a row in an item; all of one item are in flight
constexpr uint32_t kItemBytes = kSteps * kStepBytes;
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

// Entries 0 to 7, then 8 to 15, of rows g and g + 8 of a tile, as bytes of H and of L.
struct LaneTables {
  uint32_t word[2][2][4];  // [g, g + 8][H, L]
  float scale[2];
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
    found.scale[r] = tables.scales[row[r]];
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
  const uint32_t rounds = (2 * rows + kRowThreads - 1) / kRowThreads;
  HalfRow next = half_row(p, span, threadIdx.x, rows);
#pragma unroll 1
  for (uint32_t round = 0; round < rounds; ++round) {
    const uint32_t task = round * kRowThreads + threadIdx.x;
    const HalfRow now = next;
    next = half_row(p, span, task + kRowThreads, rows);
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
  const uint32_t at = x.at + 2 * (item * kItemBytes + s * kStepBytes);
  const int left = x.left - int(item * kItemBytes);
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

// The planes of a sum as one number, in an order that does not depend on how many rows there are.
__device__ __forceinline__ float joined(float x0, float x1, float x2) {
  return fmaf(65536.f, x2, fmaf(256.f, x1, x0));
}

// The lane's share of a tile: rows g and g + 8 of it, rows 2 t and 2 t + 1 of x, scaled.
template <int kTiles>
__device__ __forceinline__ void finish_tile(float (&share)[4], Sums<kTiles>& sum, const LaneTables& tables,
                                            const float* d, int rows) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float of_plane[kPlanes];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      of_plane[tile] = fmaf(float(kBase), float(sum[0][tile][i]), float(sum[1][tile][i]));
      sum[0][tile][i] = sum[1][tile][i] = 0;
    }
    if (kTogether<kTiles>) {  // plane t of rows 0 and 1 of x
      const float own = of_plane[0];
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane) of_plane[plane] = __shfl_sync(~0u, own, lane / 4 * 4 + plane);
    }
    const int row = min(2 * (lane % 4) + i % 2, rows - 1);
    share[i] = joined(of_plane[0], of_plane[1], of_plane[2]) * tables.scale[i / 2] * d[row];
  }
}

// All of the warp's items of a group of tiles; the ring holds that at the cursor, and is left with the one after.
template <int kTiles>
__device__ __forceinline__ void sum_tiles(const RowGemv& p, const Span& span, float* shares, uint32_t first,
                                          const Tables& tables, const float* d, const Planes& x, Cursor& cursor,
                                          LaneRows& next, uint4 (&ring)[kSteps][2]) {
  const uint32_t end = min(first + p.group, span.tiles);
  Sums<kTiles> sum = {};
  LaneTables mine = {};
  uint32_t of = ~0u;
#pragma unroll 1
  while (cursor.tile < end) {
    const Cursor now = cursor;
    if (of != now.tile) mine = lane_tables(p, span, tables, of = now.tile);
    cursor.advance(p.items);
    next = cursor.tile == now.tile ? next.from(kRowWarps * kItemBytes)
                                   : lane_rows(p, span, cursor.tile).from(cursor.item * kItemBytes);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      multiply_step<kTiles>(sum, mine, ring[s], x, now.item, s);
      load_step(ring[s], next, s);
    }
    if (cursor.tile == now.tile) continue;
    float share[4];
    finish_tile<kTiles>(share, sum, mine, d, p.rows);
    leave_share(shares + ((now.tile - first) * kRowWarps + threadIdx.x / 32) * kRowTile * p.rows, share, p.rows);
  }
}

// Shared memory: floats of the warps, d and largest of 8 rows of x, two sets of shares, tables, planes.
template <typename T, int kTiles>
__global__ void __launch_bounds__(kRowThreads, kTiles == 1 ? 2 : 1)
    rowlut_gemv_kernel(const __grid_constant__ RowLutGemv p, const T* x, void* y) {
  const uint32_t set_floats = p.row.group * kRowWarps * kRowTile * p.row.rows;
  float* const scratch = reinterpret_cast<float*>(dynamic_memory());
  float* const d = scratch + kRowWarps;
  uint32_t* const largest = reinterpret_cast<uint32_t*>(d + 8);
  float* const shares = d + 16;
  Tables tables;
  tables.bytes = reinterpret_cast<uint4*>(shares + 2 * set_floats);
  tables.scales = reinterpret_cast<float*>(tables.bytes + 2 * p.most);
  uint8_t* const planes = reinterpret_cast<uint8_t*>(tables.scales + p.most);
  const Span span = span_of(p.row);
  const uint32_t warp = threadIdx.x / 32;
  Cursor cursor = {warp / p.row.items, warp % p.row.items};
  LaneRows item = lane_rows(p.row, span, cursor.tile).from(cursor.item * kItemBytes);
  uint4 ring[kSteps][2];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) load_step(ring[s], item, s);
  if (threadIdx.x < 8) largest[threadIdx.x] = 0;
  fill_tables(p, span, tables);
  release_dependents();
  dependency_wait();
  __syncthreads();
  split_x(p.row, planes, d, largest, x, scratch);
  __syncthreads();
  const Planes source = planes_of_lane<kTiles>(p.row, planes);
#pragma unroll 1
  for (uint32_t first = 0, set = 0; first < span.tiles; first += p.row.group, set ^= 1) {
    float* const mine = shares + set * set_floats;
    sum_tiles<kTiles>(p.row, span, mine, first, tables, d, source, cursor, item, ring);
    __syncthreads();
    write_group<T>(p.row, span, mine, first, y);
  }
}

}  // namespace localq::rowlut
