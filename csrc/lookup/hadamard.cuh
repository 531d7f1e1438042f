// The butterflies of H, the normalized Hadamard matrices on the diagonal of localq/quant/hadamard.py, in f32: what
// hadamard.cu and the products that rotate x themselves (rotation.cuh) share, so that both are that definition bit for
// bit. Distances 1, 2, 4, .. in this order; signs go before, the scale and one rounding behind.
//
// A lane has eight columns, of which one byte has the signs: distances below 8 are within it, those below kWarpColumns
// within its warp. The others meet in shared memory, where the same column of every kWarpColumns does.
#pragma once

#include "common/gemv.cuh"
#include "lookup/hadamard.h"

namespace localq {

constexpr uint32_t kLaneColumns = 8;  // columns of a lane
constexpr uint32_t kWarpColumns = 32 * kLaneColumns;
constexpr uint32_t kWarpsOfBlock = kLargestBlock / kWarpColumns;  // of the largest

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

// Distances below kWarpColumns and below `block`. Of a warp's columns lane l gives v those from 8 l on, and is left
// with those from 4 l on in its first half and with those 128 behind in its second (place_in_warp). Two lanes that meet
// exchange halves, after which every butterfly is within a lane: half as many shuffles as when all eight are sent.
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

// Where in its warp's columns the lane has the first of half `half` of what turn_in_warp leaves.
__device__ __forceinline__ uint32_t place_in_warp(uint32_t half) {
  return kWarpColumns / 2 * half + kLaneColumns / 2 * (threadIdx.x % 32);
}

// The distances that are left, for two columns of the result behind each other: those of row `row` of a Hadamard matrix
// of kWarps, of the columns at `first` and every kWarpColumns behind. Pairs are added as butterflies would, so the bits
// are theirs.
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

// Half `half` of the lane's columns to shared memory, to those of its warp.
__device__ __forceinline__ void put_half(float* warp, const float (&v)[kLaneColumns], uint32_t half) {
  const float* const of = v + kLaneColumns / 2 * half;
  *reinterpret_cast<float4*>(warp + place_in_warp(half)) = make_float4(of[0], of[1], of[2], of[3]);
}

// The same scaled and rounded to `to`.
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
