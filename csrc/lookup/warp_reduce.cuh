// vq_gemv: the four registers of an accumulator, over all lanes, to the 16 sums of a tile.
#pragma once

#include "lookup/gemv.cuh"

namespace localq::vq {

// The sum of an accumulator over the lanes with the same t (and, with 8 rows of x, in the same half of the warp): of
// its four registers each lane is left with the one that its bits kUpper and kOdd say.
template <int kRows>
__device__ __forceinline__ float folded(const float (&c)[4]) {
  constexpr uint32_t kUpper = kRows == 8 ? 8 : 16, kOdd = kUpper / 2;
  const uint32_t lane = threadIdx.x % 32;
  const bool upper = lane & kUpper, odd = lane & kOdd;
  float kept[2] = {upper ? c[2] : c[0], upper ? c[3] : c[1]};
  kept[0] += __shfl_xor_sync(~0u, upper ? c[0] : c[2], kUpper);
  kept[1] += __shfl_xor_sync(~0u, upper ? c[1] : c[3], kUpper);
  float sum = odd ? kept[1] : kept[0];
  sum += __shfl_xor_sync(~0u, odd ? kept[0] : kept[1], kOdd);
  if (kRows != 8) sum += __shfl_xor_sync(~0u, sum, 4);
  return sum;
}

// Where in its tile's sums [16][kRows] what folded() leaves of accumulator d belongs.
template <int kRows>
__device__ __forceinline__ uint32_t place_of_sum(uint32_t d) {
  const uint32_t lane = threadIdx.x % 32, t = lane % 4;
  const uint32_t upper = lane / (kRows == 8 ? 8 : 16) % 2, odd = lane / (kRows == 8 ? 4 : 8) % 2;
  if (kRows == 1) return 4 * t + 2 * upper + odd;
  if (kRows == 2) return (4 * t + 2 * upper + d) * 2 + odd;
  if (kRows == 4) return (8 * (t / 2) + 2 * d + upper) * 4 + 2 * (t % 2) + odd;
  return (2 * d + upper) * 8 + 2 * t + odd;
}

// The same with one row of x, in stages between which other work is done: a shuffle takes longer than a warp can wait
// for, and all three of an item follow from each other.
struct Folding {
  static constexpr int kLast = 4;  // number of the last stage

  float part[4];
  float* to;  // the lane's place in Shared::sums
  float back;

  // Of no item: adds zero.
  __device__ __forceinline__ Folding(float* place, float power) : part{}, to(place), back(power) {
  }

  // The next item: its accumulator, and where its tile's sums begin, counted from those of the item before.
  __device__ __forceinline__ void take(const float (&sum)[4], uint32_t apart) {
#pragma unroll
    for (int k = 0; k < 4; ++k) part[k] = sum[k];
    to += apart;
  }

  // Stage 0, 1, .. kLast.
  __device__ __forceinline__ void go_on(int stage) {
    const bool upper = threadIdx.x & 16, odd = threadIdx.x & 8, mine = (threadIdx.x & 4) == 0;
    if (stage == 0) {
      const float sent[2] = {upper ? part[0] : part[2], upper ? part[1] : part[3]};
      part[0] = upper ? part[2] : part[0], part[1] = upper ? part[3] : part[1];
      part[2] = __shfl_xor_sync(~0u, sent[0], 16), part[3] = __shfl_xor_sync(~0u, sent[1], 16);
    } else if (stage == 1) {
      part[0] += part[2], part[1] += part[3];
      part[2] = __shfl_xor_sync(~0u, odd ? part[0] : part[1], 8);
    } else if (stage == 2) {
      part[0] = (odd ? part[1] : part[0]) + part[2];
      part[2] = __shfl_xor_sync(~0u, part[0], 4);
    } else if (stage == 3) {
      part[0] += part[2];
      if (mine) part[1] = *to;
    } else if (stage == kLast) {
      if (mine) *to = part[1] + part[0] * back;
    }
  }
};

}  // namespace localq::vq
