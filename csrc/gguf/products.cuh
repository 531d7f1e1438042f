// Tensor core products of a tile block, common to all block types.
#pragma once

#include "common/mma.cuh"
#include "gguf/x.cuh"

namespace localq::gguf {

// c += a * b, halves.
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma(c, a, b0, b1, __half{});
}

// sum += scale * c: scale.x for row g of W, scale.y for row g + 8.
__device__ __forceinline__ void add_scaled(float (&sum)[4], const float (&c)[4], float2 scale) {
  sum[0] += scale.x * c[0], sum[1] += scale.x * c[1];
  sum[2] += scale.y * c[2], sum[3] += scale.y * c[3];
}

// sum -= minimums * sums of x, with minimums [row][run] in `a` for eight runs and for the same once more: the high
// parts of the sums of x meet the first, the low parts the second.
__device__ __forceinline__ void subtract_minimums(float (&sum)[4], const uint32_t (&a)[2], uint2 sums, float2 scale) {
  const uint32_t both[4] = {a[0], a[1], a[0], a[1]};
  float c[4] = {};
  multiply(c, both, sums.x, sums.y);
  add_scaled(sum, c, {-scale.x, -scale.y});
}

// Bytes `first` and `first + 1` of `bytes`, `first` 0 or 2, as halves.
__device__ __forceinline__ uint32_t two_bytes(uint32_t bytes, uint32_t first) {
  const uint32_t pair = __byte_perm(bytes, kMagic, 0x4140u + 0x0101u * first);
  return as<uint32_t>(__hadd2(as<__half2>(pair), twice(-1024.f)));
}

}  // namespace localq::gguf
