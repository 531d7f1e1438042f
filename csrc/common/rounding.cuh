// Conversions and roundings of f16, bf16 and f32 for formats whose definition names each rounding. As in torch: compute
// in f32, then round to nearest, ties to even.
#pragma once

#include "common/gemv.cuh"  // to_float, round_to

namespace localq {

__device__ __forceinline__ float to_float(float value) {
  return value;
}
__device__ __forceinline__ void round_to(float from, float& to) {
  to = from;
}

// `value` rounded to T, as f32.
template <typename T>
__device__ __forceinline__ float rounded(float value) {
  T to;
  round_to(value, to);
  return to_float(to);
}

// Adjacent values that are loaded and stored together, up to 16 bytes at a time.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount < 16 ? sizeof(T) * kCount : 16) Run {
  T value[kCount];
};

}  // namespace localq
