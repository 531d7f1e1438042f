// bcq_dequantize: the kernel (bcq_dequantize.cu says what it does).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "bcq_gemv.h"
#include "gemv.cuh"
#include "launch.h"

namespace localq::bcq_weights {

constexpr uint32_t kTile = 16, kThreads = 256, kPositions = kThreads / 4;
constexpr uint32_t kBlock = 128;  // positions of a whole block of columns

struct Arguments {
  const uint8_t* codes;
  const uint8_t* scales;
  uint32_t planes, layers, positions, groups, group_shift;
  uint32_t first_tile, rows, chunks;  // rows to write, counted from the first tile's; chunks of kPositions of a row
};

// The eight columns that position `at` of a tile stands for: their number among the row's eights.
__device__ __forceinline__ uint32_t eight_of(const Arguments& p, uint32_t at) {
  const uint32_t block = at / kBlock * kBlock, four = at % kBlock / 4;
  if (block + kBlock > p.positions) return at;
  return block + 4 * (four % 8 * 4 + four / 8) + at % 4;
}

// What a thread has of a position: codes and scales of four rows in each layer.
struct Quarter {
  uint32_t codes[kMaxPlanes];
  uint2 scales[kMaxPlanes + 1];
};

__device__ __forceinline__ float half_of(const uint2& scales, int r) {
  const uint16_t bits = uint16_t((r < 2 ? scales.x : scales.y) >> (r % 2 * 16));
  return __half2float(reinterpret_cast<const __half&>(bits));
}

// Eight weights of row r of the four, summed in the order of the definition.
template <typename T>
__device__ __forceinline__ uint4 weights_of(const Arguments& p, const Quarter& q, int r) {
  float value[8] = {};
#pragma unroll
  for (int b = 0; b < kMaxPlanes; ++b) {
    if (uint32_t(b) >= p.planes) break;
    const float scale = half_of(q.scales[b], r);
    const uint32_t code = q.codes[b] >> (8 * r);
#pragma unroll
    for (int j = 0; j < 8; ++j) value[j] += code >> j & 1 ? scale : -scale;
  }
  const float zero = half_of(q.scales[kMaxPlanes], r);
  uint32_t word[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    T low, high;
    round_to(value[2 * j] + zero, low);
    round_to(value[2 * j + 1] + zero, high);
    word[j] = reinterpret_cast<const uint16_t&>(low) | uint32_t(reinterpret_cast<const uint16_t&>(high)) << 16;
  }
  return make_uint4(word[0], word[1], word[2], word[3]);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) bcq_dequantize_kernel(Arguments p, T* out) {
  release_dependents();
  const uint32_t tile = blockIdx.x / p.chunks, at = blockIdx.x % p.chunks * kPositions + threadIdx.x / 4;
  const uint32_t rows = threadIdx.x % 4 * 4;
  Quarter q = {};
  const uint32_t eight = at < p.positions ? eight_of(p, at) : 0;
  if (at < p.positions) {
    const uint32_t group = eight >> p.group_shift;
    const uint8_t* const codes = p.codes + (uint64_t(p.first_tile + tile) * p.planes * p.positions + at) * kTile + rows;
    const uint8_t* const scales =
        p.scales + ((uint64_t(p.first_tile + tile) * p.layers * p.groups + group) * kTile + rows) * 2;
#pragma unroll
    for (uint32_t b = 0; b < kMaxPlanes; ++b) {
      if (b >= p.planes) break;
      q.codes[b] = __ldg(reinterpret_cast<const uint32_t*>(codes + uint64_t(b) * p.positions * kTile));
      q.scales[b] = __ldg(reinterpret_cast<const uint2*>(scales + b * p.groups * kTile * 2));
    }
    if (p.layers > p.planes) {
      q.scales[kMaxPlanes] = __ldg(reinterpret_cast<const uint2*>(scales + p.planes * p.groups * kTile * 2));
    }
  }
  dependency_wait();
  if (at >= p.positions) return;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const uint32_t row = tile * kTile + rows + r;
    if (row >= p.rows) break;
    reinterpret_cast<uint4*>(out)[uint64_t(row) * p.positions + eight] = weights_of<T>(p, q, r);
  }
}

}  // namespace localq::bcq_weights
