// Values of the three types and their roundings, where a definition names each of them (as torch computes: in f32, then
// rounded to nearest, ties to even).
#pragma once

#include "common/gemv.cuh"  // to_float, round_to

namespace localq {

__device__ __forceinline__ float to_float(float value) {
  return value;
}
__device__ __forceinline__ void round_to(float from, float& to) {
  to = from;
}

// `value` as T has it.
template <typename T>
__device__ __forceinline__ float rounded(float value) {
  T to;
  round_to(value, to);
  return to_float(to);
}

// Neighbours that are read and written together, 16 bytes at a time where they are so many.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount < 16 ? sizeof(T) * kCount : 16) Run {
  T value[kCount];
};

}  // namespace localq
