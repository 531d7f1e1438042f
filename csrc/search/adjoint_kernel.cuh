// Device side of adjoint.cu: what a lane does, knowing nothing of the others.
#pragma once

#include <cstdint>

namespace localq {

constexpr uint32_t kAdjointEntries = 256, kAdjointLanes = 32;

struct Adjoint {
  const float* matrix;   // [rows, columns]
  const uint8_t* codes;  // [rows, positions]
  float* sums;           // [shares, 256, length]
  uint32_t rows, columns, positions, stride, length;
  uint32_t width;  // lanes of a position: `length`, up to a power of two
};

// Adds the positions of a row that are the lane's to `own`, its column of the table [256, 32].
__device__ __forceinline__ void add_row(const Adjoint& p, uint32_t row, uint32_t lane, float* own) {
  constexpr int kAtOnce = 16;  // loads that are in flight together
  const uint32_t together = kAdjointLanes / p.width, weight = lane % p.width;
  const float* const matrix = p.matrix + uint64_t(row) * p.columns + weight;
  const uint8_t* const codes = p.codes + uint64_t(row) * p.positions;
#pragma unroll 1
  for (uint32_t begin = lane / p.width; begin < p.positions; begin += kAtOnce * together) {
    float values[kAtOnce];
    uint32_t at[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const uint32_t position = begin + k * together, column = position * p.stride;
      const bool there = position < p.positions;
      at[k] = there ? codes[position] : 0;
      values[k] = there && weight < p.length && column + weight < p.columns ? matrix[column] : 0.f;
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) own[at[k] * kAdjointLanes] += values[k];
  }
}

// Sum `i` of [256, length]: what the lanes of that weight have, added in their order.
__device__ __forceinline__ float sum_of_lanes(const Adjoint& p, const float* table, uint32_t i) {
  const float* const entry = table + i / p.length * kAdjointLanes + i % p.length;
  float sum = 0.f;
  for (uint32_t at = 0; at < kAdjointLanes; at += p.width) sum += entry[at];
  return sum;
}

}  // namespace localq
