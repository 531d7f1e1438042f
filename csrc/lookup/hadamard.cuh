// The butterflies of H, the normalized Hadamard matrices on the diagonal (localq/formats/codebooks/rotation.py), in
// f32. Used by hadamard.cu and by the products that rotate x themselves (rotation.cuh), so that both are bitwise the
// definition: distances 1, 2, 4, .. in this order, signs before, scale and one rounding after.
//
// A lane has eight columns, whose signs are one byte: distances below 8 stay within a lane, those below kWarpColumns
// within a warp. The others go through shared memory, over the same column of every kWarpColumns.
#pragma once

#include "common/gemv.cuh"
#include "lookup/hadamard.h"

namespace localq {

constexpr uint32_t kLaneColumns = 8;  // columns per lane
constexpr uint32_t kWarpColumns = 32 * kLaneColumns;
constexpr uint32_t kWarpsOfBlock = kLargestBlock / kWarpColumns;  // warps of the largest Hadamard block

__device__ __forceinline__ void butterfly(float& a, float& b) {
  const float sum = a + b;
  b = a - b;
  a = sum;
}

// The lane's columns with their signs.
template <typename T>
__device__ __forceinline__ void take_signs(float (&v)[kLaneColumns], const Eight<T>& eight, uint32_t minus) {
#pragma unroll
  for (uint32_t i = 0; i < kLaneColumns; ++i)
    v[i] = minus >> i & 1 ? -to_float(eight.value[i]) : to_float(eight.value[i]);
}

// Distances below kWarpColumns and below `block`. On entry lane l has the warp's columns from 8 l; on exit the first
// half of v is the columns from 4 l, the second half those 128 later (place_in_warp). Two partner lanes exchange
// halves, after which every butterfly is within a lane: half as many shuffles as sending all eight.
__device__ __forceinline__ void turn_in_warp(float (&v)[kLaneColumns], uint32_t block) {
  constexpr uint32_t kHalf = kLaneColumns / 2;
#pragma unroll
  for (uint32_t distance = 1; distance < kLaneColumns; distance *= 2) {
#pragma unroll
    for (uint32_t i = 0; i < kLaneColumns; ++i) {
      if ((i & distance) == 0) butterfly(v[i], v[i + distance]);
    }
  }
#pragma unroll
  for (uint32_t lanes = 1; lanes < 32; lanes *= 2) {
    const bool upper = threadIdx.x & lanes;
#pragma unroll
    for (uint32_t i = 0; i < kHalf; ++i) {
      const float other = __shfl_xor_sync(~0u, upper ? v[i] : v[kHalf + i], lanes);
      v[i] = upper ? other : v[i];
      v[kHalf + i] = upper ? v[kHalf + i] : other;
      if (lanes * kLaneColumns < block) butterfly(v[i], v[kHalf + i]);
    }
  }
}

// The first column, within the warp's, of half `half` of the result of turn_in_warp.
__device__ __forceinline__ uint32_t place_in_warp(uint32_t half) {
  return kWarpColumns / 2 * half + kLaneColumns / 2 * (threadIdx.x % 32);
}

// The remaining distances, for two adjacent columns of the result: row `row` of a Hadamard matrix of kWarps, applied to
// the columns at `first` and every kWarpColumns after. Pairs are added in the order of the butterflies, so the result
// is bitwise theirs.
template <uint32_t kWarps>
__device__ __forceinline__ float2 sum_across(const float* first, uint32_t row) {
  float2 v[kWarps];
#pragma unroll
  for (uint32_t w = 0; w < kWarps; ++w) v[w] = *reinterpret_cast<const float2*>(first + w * kWarpColumns);
#pragma unroll
  for (uint32_t distance = 1; distance < kWarps; distance *= 2) {
    const float sign = row & distance ? -1.f : 1.f;
#pragma unroll
    for (uint32_t w = 0; w < kWarps; w += 2 * distance) {
      v[w].x = fmaf(sign, v[w + distance].x, v[w].x), v[w].y = fmaf(sign, v[w + distance].y, v[w].y);
    }
  }
  return v[0];
}

// Stores half `half` of the lane's columns in shared memory, among those of its warp.
__device__ __forceinline__ void put_half(float* warp, const float (&v)[kLaneColumns], uint32_t half) {
  const float* const of = v + kLaneColumns / 2 * half;
  *reinterpret_cast<float4*>(warp + place_in_warp(half)) = make_float4(of[0], of[1], of[2], of[3]);
}

// The same, scaled and rounded, to `to`.
template <typename T>
struct alignas(8) Four {
  T value[4];
};

template <typename T>
__device__ __forceinline__ Four<T> rounded_half(const float (&v)[kLaneColumns], uint32_t half, float scale) {
  Four<T> four;
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) round_to(__fmul_rn(v[4 * half + i], scale), four.value[i]);
  return four;
}

}  // namespace localq
