// What a thread of the search holds of an event in registers, and its arithmetic (beam_search_kernel.cuh).
#pragma once

#include "search/beam_search_plan.h"

namespace localq {

template <int kCount>
struct alignas(4 * kCount) Floats {
  float at[kCount];
};

template <int kCount>
__device__ __forceinline__ Floats<kCount> load(const float* from) {
  return *reinterpret_cast<const Floats<kCount>*>(from);
}

// `step` floats that may be more than one load.
template <int kStep>
struct Stretch {
  static constexpr int kVector = search_vector(kStep);
  float at[kStep];
  __device__ __forceinline__ void read(const float* from) {
#pragma unroll
    for (int i = 0; i < kStep; i += kVector) {
      const auto some = load<kVector>(from + i);
#pragma unroll
      for (int j = 0; j < kVector; ++j) at[i + j] = some.at[j];
    }
  }
  __device__ __forceinline__ void write(float* to) const {
#pragma unroll
    for (int i = 0; i < kStep; i += kVector) {
      Floats<kVector> some;
#pragma unroll
      for (int j = 0; j < kVector; ++j) some.at[j] = at[i + j];
      *reinterpret_cast<Floats<kVector>*>(to + i) = some;
    }
  }
  __device__ __forceinline__ float squares() const {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kStep; ++i) sum = fmaf(at[i], at[i], sum);
    return sum;
  }
};

// A lane's share of an event's table, in registers: kSlots of the codewords of a chunk of 32 * kSlots.
template <int kStep>
struct Codewords {
  static constexpr int kSlots = kStep <= 4 ? 8 : 32 / kStep;
  static constexpr int kChunks = kSearchEntries / (32 * kSlots);
  static constexpr int kVector = kSlots < 4 ? kSlots : 4;
  float part[kStep + 1][kSlots];  // the last: squares

  static __device__ __forceinline__ int code(int chunk, int lane, int slot) {
    return (chunk * kSlots + slot / kVector * kVector) * 32 + lane * kVector + slot % kVector;
  }
  __device__ __forceinline__ void read(const float* table, int chunk, int lane) {
#pragma unroll
    for (int i = 0; i <= kStep; ++i) {
#pragma unroll
      for (int slot = 0; slot < kSlots; slot += kVector) {
        const auto some = load<kVector>(table + i * kSearchEntries + code(chunk, lane, slot));
#pragma unroll
        for (int j = 0; j < kVector; ++j) part[i][slot + j] = some.at[j];
      }
    }
  }
  // Squared distance from `aim`, which is -2 times what is wanted, less what all codewords share.
  __device__ __forceinline__ void distances(const float* aim, float (&distance)[kSlots]) const {
    Stretch<kStep> wanted;
    wanted.read(aim);
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) distance[slot] = part[kStep][slot];
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) distance[slot] = fmaf(wanted.at[i], part[i][slot], distance[slot]);
    }
  }
};

// The 32 lanes' values in ascending order, one a lane: a bitonic sort.
__device__ __forceinline__ float sorted_lanes(float value, int lane) {
#pragma unroll
  for (int size = 2; size <= 32; size *= 2) {
#pragma unroll
    for (int step = size / 2; step > 0; step /= 2) {
      const float other = __shfl_xor_sync(~0u, value, step);
      value = ((lane & step) == 0) == ((lane & size) == 0) ? fminf(value, other) : fmaxf(value, other);
    }
  }
  return value;
}

}  // namespace localq
