// bcq_gemv: what differs from vq_gemv: codes of several planes, and scales for groups of columns.
//
// A code stands for the signs of 8 columns of one plane, so all planes of a tile are looked up in the same table, that
// of the 256 sign vectors. A row of operand A, and so of an accumulator, are the four lanes of an octet's part 4 g ..
// 4 g + 3: positions of 32 columns, which share a scale whatever the group. Whole blocks of 1,024 columns lie in an
// order in which all loads of octet g (128 columns with one row of x, 64 with two) have columns behind each other: then
// one scale is enough for all of them, where groups are as large, and is multiplied in behind the last product. The
// zero point is a layer without codes: its scales times sums of x.
#pragma once

#include "vq_lookup.cuh"
#include "vq_tables.cuh"

namespace localq::bcq {

using namespace vq;

constexpr uint32_t kBlock = 128;     // positions of a block of columns
constexpr uint32_t kColumns = 1024;  // columns of it
constexpr float kFactor = 8.f;       // the table's sign vectors are of 1/8, so that no entry overflows

// Are columns `from` .. `from` + kColumns - 1 a whole block?
__device__ __forceinline__ bool is_whole(const Arguments& p, uint32_t from) {
  return from + kColumns <= p.in;
}

// Where a chunk of eight columns of the slice, a position, lies: in whole blocks, four positions are number 8 i + g
// instead of 4 g + i.
struct InBlocks {
  const Arguments& p;
  uint32_t column;

  __device__ __forceinline__ uint32_t operator()(uint32_t chunk) const {
    const uint32_t block = chunk / kBlock * kBlock, four = chunk % kBlock / 4;
    if (!is_whole(p, column + 8 * block)) return chunk;
    return block + 4 * (four % 4 * 8 + four / 4) + chunk % 4;
  }
};

// Words of two scales of a load: those of the lane's rows (vq_lookup.cuh).
template <int kRows>
__host__ __device__ constexpr int scale_words() {
  return kRows <= 2 ? 2 : kRows;
}

// What is loaded for an item: codes, and the scales of its first load, which are those of all where groups are large.
// Those of others wait until they are needed: two items' of all do not fit the registers of every card.
template <int kRows>
struct Work {
  Codes<kRows> codes;
  uint32_t scales[scale_words<kRows>()];
};

// An item and a layer of it, in the warp's order: layer by layer where each has sums of its own, so that warps share
// the layers of an item; else all layers of an item behind each other.
struct Cursor {
  uint32_t item, layer;
};

__device__ __forceinline__ bool is_live(const Arguments& p, uint32_t items, const Cursor& at) {
  return at.item < items && at.layer < p.layers;
}

__device__ __forceinline__ Cursor settled(const Arguments& p, uint32_t items, Cursor at) {
  if (p.copies == 1) return at;
  while (at.item >= items && at.layer < p.layers) at.item -= items, ++at.layer;
  return at;
}

__device__ __forceinline__ Cursor next_of(const Arguments& p, uint32_t items, Cursor at) {
  if (p.copies == 1 && ++at.layer < p.layers) return at;
  if (p.copies == 1) at.layer = 0;
  at.item += kWarps;
  return settled(p, items, at);
}

// Are one lane's columns of all loads of the step in one group?
template <int kRows>
__device__ __forceinline__ bool is_coarse(const Arguments& p, const Step& step) {
  if (kRows >= 4) return true;  // there is one load
  return p.group_shift >= (kRows == 1 ? 4u : 3u) && is_whole(p, step.position / kBlock * kColumns);
}

// The group of the lane's columns of load i.
template <int kRows>
__device__ __forceinline__ uint32_t group_of(const Arguments& p, const Step& step, uint32_t i) {
  uint32_t at = step.position + kGroup * i + threadIdx.x % (kRows == 8 ? 16 : 32) / 4 * 4;
  if (is_whole(p, at / kBlock * kColumns)) {
    const uint32_t four = at % kBlock / 4;
    at = at / kBlock * kBlock + 4 * (four % 8 * 4 + four / 8);
  }
  return min(at >> p.group_shift, p.groups - 1);
}

// The scales of a load of an item's layer.
template <int kRows>
__device__ __forceinline__ void load_scales_of(uint32_t (&scales)[scale_words<kRows>()], const Arguments& p,
                                               const Shared& s, const Step& step, const Cursor& at, uint32_t load) {
  const uint32_t tile = step.codes + min(tile_of<kRows>(at.item), step.tiles - 1), t = threadIdx.x % 4;
  const uint32_t rows = kRows <= 2 ? 4 * t : kRows == 4 ? t / 2 * 8 : 0;
  const uint8_t* const from = s.codes[p.tiles + tile] + 2 * rows;
  load_scales(scales, from + (at.layer * p.groups + group_of<kRows>(p, step, load)) * (2 * kTile));
}

// The codes and the first scales of an item's layer, if it is one.
template <int kRows>
__device__ __forceinline__ void load_work(Work<kRows>& work, const Arguments& p, const Shared& s, const Step& step,
                                          const Cursor& at) {
  if (!is_live(p, items_of<kRows>(step), at)) return;
  const uint32_t tile = step.codes + min(tile_of<kRows>(at.item), step.tiles - 1);
  if (at.layer < p.planes) load_tile<kRows>(work.codes, s.codes[tile] + at.layer * p.book[0].positions * kTile, step);
  load_scales_of<kRows>(work.scales, p, s, step, at, 0);
}

// Half r of `words`.
template <int kWords>
__device__ __forceinline__ float scale_at(const uint32_t (&words)[kWords], int r) {
  const uint32_t bits = r % 2 == 0 ? words[r / 2] & 0xffffu : words[r / 2] >> 16;
  const uint16_t half = uint16_t(bits);
  return __half2float(reinterpret_cast<const __half&>(half));
}

// Register c of accumulator d: which of the lane's rows it is.
template <int kRows>
__host__ __device__ constexpr int row_of(int d, int c) {
  return kRows == 1 ? c : kRows == 2 ? c / 2 * 2 + d : 2 * d + c / 2;
}

template <int kRows>
__device__ __forceinline__ void add_scaled(float (&total)[kRows][4], const float (&sum)[kRows][4],
                                           const uint32_t (&scales)[scale_words<kRows>()]) {
#pragma unroll
  for (int d = 0; d < kRows; ++d) {
#pragma unroll
    for (int c = 0; c < 4; ++c) total[d][c] += sum[d][c] * scale_at(scales, row_of<kRows>(d, c));
  }
}

template <int kRows>
__device__ __forceinline__ void fill_sums(float (&sum)[kRows][4], float even, float odd) {
#pragma unroll
  for (int d = 0; d < kRows; ++d) sum[d][0] = sum[d][2] = even, sum[d][1] = sum[d][3] = odd;
}

// Load i of a plane, where each has scales of its own.
template <int kRows, int kLoad>
__device__ __forceinline__ void add_load(float (&total)[kRows][4], const Arguments& p, const Shared& s,
                                         const Step& step, const Cursor& at, uint32_t tables, uint32_t column,
                                         const Work<kRows>& work, const Selectors<kRows>& select) {
  float sum[kRows][4] = {};
  uint32_t scales[scale_words<kRows>()];
#pragma unroll
  for (int k = 0; k < scale_words<kRows>(); ++k) scales[k] = work.scales[k];
  if (kLoad > 0) load_scales_of<kRows>(scales, p, s, step, at, kLoad);
  add_codes<kRows, offset_of_load<kRows>(kLoad)>(sum, tables, column, work.codes.load[kLoad], select);
  add_scaled<kRows>(total, sum, scales);
}

// All codes of an item's plane looked up, scaled and added.
template <int kRows>
__device__ __forceinline__ void add_plane(float (&total)[kRows][4], const Arguments& p, const Shared& s,
                                          const Step& step, const Cursor& at, uint32_t tables, uint32_t column,
                                          uint32_t groups, bool coarse, const Work<kRows>& work,
                                          const Selectors<kRows>& select) {
  if (coarse) {
    float sum[kRows][4] = {};
    add_loads<kRows>(sum, tables, column, groups, work.codes, select);
    add_scaled<kRows>(total, sum, work.scales);
    return;
  }
  if constexpr (kRows <= 2) {
    add_load<kRows, 0>(total, p, s, step, at, tables, column, work, select);
    if (groups > 1) add_load<kRows, 1>(total, p, s, step, at, tables, column, work, select);
  }
  if constexpr (kRows == 1) {
    if (groups > 2) add_load<kRows, 2>(total, p, s, step, at, tables, column, work, select);
    if (groups > 3) add_load<kRows, 3>(total, p, s, step, at, tables, column, work, select);
  }
}

// The zero points of an item. `x_sums`: of the lane's columns, behind each other for its rows of x, and so many from
// one load to the next.
template <int kRows>
__device__ __forceinline__ void add_zero(float (&total)[kRows][4], const Arguments& p, const Shared& s,
                                         const Step& step, const Cursor& at, const float* x_sums, uint32_t groups,
                                         bool coarse, const Work<kRows>& work) {
  float even = 0.f, odd = 0.f, sum[kRows][4];
  uint32_t scales[scale_words<kRows>()];
#pragma unroll
  for (int k = 0; k < scale_words<kRows>(); ++k) scales[k] = work.scales[k];
#pragma unroll 1
  for (uint32_t i = 0; i < min(groups, uint32_t(loads_of_item<kRows>())); ++i) {
    even += x_sums[8 * i * kRows], odd += x_sums[8 * i * kRows + (kRows > 1)];
    if (coarse) continue;
    if (i > 0) load_scales_of<kRows>(scales, p, s, step, at, i);
    fill_sums<kRows>(sum, even, odd);
    add_scaled<kRows>(total, sum, scales);
    even = odd = 0.f;
  }
  if (!coarse) return;
  fill_sums<kRows>(sum, even, odd);
  add_scaled<kRows>(total, sum, scales);
}

// Where add_zero() finds the sums of x of load 0.
template <int kRows>
__device__ __forceinline__ const float* x_sums_of(const Arguments& p, const Shared& s, const Step& step) {
  const uint32_t lane = threadIdx.x % 32, t = lane % 4, four = step.window / 32 + lane % (kRows == 8 ? 16 : 32) / 4;
  const uint32_t row = kRows <= 2 ? 0 : kRows == 4 ? t % 2 * 2 : 2 * t;
  return s.sums + p.copies * p.tiles * kTile * kRows + four * kRows + row;
}

// All items of the warp in `step`, whose table is number `number`; as add_step() of vq_gemv. `at` is the first of them,
// `work` what it has, and both are left at the first of `next`.
template <int kRows>
__device__ __forceinline__ void add_layers(const Arguments& p, const Shared& s, uint32_t number, const Step step,
                                           const Step& next, const Selectors<kRows>& select, Work<kRows>& work) {
  const uint32_t lane = threadIdx.x % 32, items = items_of<kRows>(step), tables = shared_address(s.tables);
  const uint32_t column = number << 16 | (kRows <= 2 ? 4 * lane : kRows == 4 ? 8 * lane : 16 * (lane % 16));
  const uint32_t groups = (step.positions() + kGroup - 1) / kGroup;
  const float back = s.back[place_of_sum<kRows>(0) % kRows];
  const bool coarse = is_coarse<kRows>(p, step);
  const Cursor begin = {warp_number(), 0};
  Cursor at = settled(p, items, begin);
  if (!is_live(p, items, at)) load_work<kRows>(work, p, s, next, settled(p, items_of<kRows>(next), begin));
#pragma unroll 1
  while (is_live(p, items, at)) {
    Work<kRows> following;
    const Cursor then = next_of(p, items, at);
    if (is_live(p, items, then)) {
      load_work<kRows>(following, p, s, step, then);
    } else {
      load_work<kRows>(following, p, s, next, settled(p, items_of<kRows>(next), begin));
    }
    float total[kRows][4] = {};
    if (at.layer < p.planes) {
      add_plane<kRows>(total, p, s, step, at, tables, column, groups, coarse, work, select);
    } else {
      add_zero<kRows>(total, p, s, step, at, x_sums_of<kRows>(p, s, step), groups, coarse, work);
    }
    const uint32_t tile = tile_of<kRows>(at.item), copy = p.copies == 1 ? 0 : at.layer * p.tiles;
    const bool mine = kRows == 8 ? tile < step.tiles : lane / 4 % 2 == 0;
    float* const sums = s.sums + (copy + step.first + tile) * (kTile * kRows);
#pragma unroll
    for (int d = 0; d < kRows; ++d) {
      const float part = folded<kRows>(total[d]);
      if (mine) sums[place_of_sum<kRows>(d)] += part * back;
    }
    work = following, at = then;
  }
}

}  // namespace localq::bcq
