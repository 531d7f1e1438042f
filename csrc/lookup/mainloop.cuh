// vq_gemv: a warp over its items of a step, an item at a time, its codes asked for one ahead (code_lookup.cuh has the
// parts).
#pragma once

#include "lookup/code_lookup.cuh"

namespace localq::vq {

// The byte of a row of a table where the lane's entries begin.
template <int kRows>
__device__ __forceinline__ uint32_t byte_of_lane() {
  const uint32_t lane = threadIdx.x % 32;
  return kRows <= 2 ? 4 * lane : kRows == 4 ? 8 * lane : 16 * (lane % 16);
}

// What the lane has of item `index` to the sums of its tile, if that is one. `back` is s.back of the row of x that
// place_of_sum() says.
template <int kRows>
__device__ __forceinline__ void add_sums(const float (&sum)[kRows][4], float* sums, const Step& step, uint32_t index,
                                         float back) {
  const uint32_t tile = tile_of<kRows>(index);
  const bool mine = kRows == 8 ? tile < step.tiles : threadIdx.x % 32 / 4 % 2 == 0;
#pragma unroll
  for (int d = 0; d < kRows; ++d) {
    const float part = folded<kRows>(sum[d]);
    if (mine) sums[tile * (kTile * kRows) + place_of_sum<kRows>(d)] += part * back;
  }
}

// The codes of item `index` for table `table` of `step`, or where that is none of the warp's first of `next`.
template <int kRows>
__device__ __forceinline__ Codes<kRows> load_following(const Shared& s, const Step& step, uint32_t index,
                                                       uint32_t table, const Step& next) {
  Codes<kRows> following;
  if (index < items_of<kRows>(step)) {
    load_item<kRows>(following, s, step, index, table);
  } else {
    load_item<kRows>(following, s, next, warp_number());
  }
  return following;
}

// Loads that an item has for a table of the step.
template <int kRows>
__device__ __forceinline__ uint32_t groups_of(const Step& step, uint32_t table) {
  return min((step.positions<kRows>(table) + kGroup - 1) / kGroup, loads_of_item<kRows>());
}

// All items of the warp in `step`, whose tables are from number `number` on; no other warp has them. `codes` has the
// first of them, and is left with the first of `next`. The codes that come next are asked for before those at hand are
// looked up, and taken over after: ptxas waits for all loads of codes together, so none may have been asked for late.
template <int kRows>
__device__ __forceinline__ void add_step(const Shared& s, uint32_t number, const Step step, const Step& next,
                                         const Selectors<kRows>& select, Codes<kRows>& codes) {
  const uint32_t warp = warp_number(), items = items_of<kRows>(step), tables = shared_address(s.tables);
  const uint32_t byte = number << 16 | byte_of_lane<kRows>();
  const bool two = step.two_tables<kRows>();
  const float back = s.back[place_of_sum<kRows>(0) % kRows];
  float* const sums = s.sums + step.first * (kTile * kRows);
  if (warp >= items) load_item<kRows>(codes, s, next, warp);
#pragma unroll 1
  for (uint32_t now = warp; now < items; now += kWarps) {
    float sum[kRows][4] = {};
#pragma unroll 1
    for (uint32_t table = 0; table <= uint32_t(two); ++table) {
      const bool behind = table < uint32_t(two);
      const Codes<kRows> following = load_following<kRows>(s, step, behind ? now : now + kWarps, behind, next);
      add_loads<kRows>(sum, tables, byte + (table << 16), groups_of<kRows>(step, table), codes, select);
      codes = following;
    }
    add_sums<kRows>(sum, sums, step, now, back);
  }
}

// The same with one row of x: the sums of an item are taken together between the look-ups of the one behind it.
template <>
__device__ __forceinline__ void add_step<1>(const Shared& s, uint32_t number, const Step step, const Step& next,
                                            const Selectors<1>& select, Codes<1>& codes) {
  const uint32_t warp = warp_number(), items = items_of<1>(step), tables = shared_address(s.tables);
  if (warp >= items) return load_item<1>(codes, s, next, warp);
  const uint32_t byte = number << 16 | byte_of_lane<1>(), groups = groups_of<1>(step, 0);
  Folding folding(s.sums + (step.first + warp) * kTile + place_of_sum<1>(0), s.back[0]);
  uint32_t apart = 0;
#pragma unroll 1
  for (uint32_t now = warp; now < items; now += kWarps, apart = kWarps * kTile) {
    const Codes<1> following = load_following<1>(s, step, now + kWarps, 0, next);
    float sum[4] = {};
    add_loads(sum, tables, byte, groups, codes, select, folding);
    folding.take(sum, apart);
    codes = following;
  }
#pragma unroll
  for (int stage = 0; stage <= Folding::kLast; ++stage) folding.go_on(stage);
}

}  // namespace localq::vq
