// Functions that a decode step and a pass of many tokens share.
#pragma once

#include "common/rounding.cuh"
#include "delta/intrinsics.cuh"

namespace localq::delta {

constexpr float kEpsilon = 1e-6f;  // beside the squared length of q and k

__device__ __forceinline__ float sigmoid(float x) {
  return reciprocal(1.f + __expf(-x));
}
__device__ __forceinline__ float softplus(float x) {
  return x > 20.f ? x : log1pf(__expf(x));  // as in torch
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
  return x;
}

}  // namespace localq::delta
