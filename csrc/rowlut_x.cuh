// x as three signed bytes a value, the operand of products of bytes: x = d (65536 X2 + 256 X1 + X0), 23 bits of fixed
// point, so off by at most largest / 8.3e6: f16 has 1/4096 and bf16 1/512 of every value. d is the row's own, so rows
// do not depend on each other. A row that holds infinity or NaN has d = NaN, and so have its results.
#pragma once

#include "row_gemv.cuh"

namespace localq::rowlut {

constexpr int kPlanes = 3;
constexpr float kLargestX = 4160000.f;  // less than 63 * 65536 + 127 * 257
constexpr float kLeastX = 1e-30f;       // rows of less become zeros; 1 / d stays finite
constexpr float kMagicX = 12615808.f;   // 2^23 + 64 * 65536 + 128 * 257: whole numbers, and every digit above zero
constexpr uint32_t kSignsOfX = 0x80808080u;

// Four values as their bits with kMagicX -> a byte of each, plane by plane.
__device__ __forceinline__ void planes_of(uint32_t (&plane)[kPlanes], const uint32_t (&bits)[4]) {
  const uint32_t low = __byte_perm(bits[0], bits[1], 0x5140), next = __byte_perm(bits[2], bits[3], 0x5140);
  const uint32_t top =
      __byte_perm(__byte_perm(bits[0], bits[1], 0x0062), __byte_perm(bits[2], bits[3], 0x0062), 0x5410);
  plane[0] = __byte_perm(low, next, 0x5410) ^ kSignsOfX;
  plane[1] = __byte_perm(low, next, 0x7632) ^ kSignsOfX;
  plane[2] = ((top | kSignsOfX) - 0x40404040u) ^ kSignsOfX;
}

// The larger of what is in either half of `words` and what `largest` has, as bits without their sign: NaN is above
// infinity, infinity above all numbers.
__device__ __forceinline__ void take_largest(uint32_t& largest, const uint4& words) {
  const uint32_t all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) largest = max(largest, max(all[i] & 0x7fffu, all[i] >> 16 & 0x7fffu));
}

template <typename T>
__device__ __forceinline__ float value_of(uint32_t bits) {
  const uint16_t half = uint16_t(bits);
  return to_float(reinterpret_cast<const T&>(half));
}

// 1 / d of a row whose largest is that; `d` the same way round, NaN where it is not finite.
template <typename T>
__device__ __forceinline__ float scale_of(float& d, uint32_t largest) {
  const float most = value_of<T>(largest), held = fmaxf(most, kLeastX);
  d = most <= 3.4e38f ? held * (1.f / kLargestX) : __uint_as_float(0x7fffffffu);
  return kLargestX / held;
}

constexpr int kBatch = 4;  // words of x that a thread has under way

// Words of 8 values of a row of x, normed where the extras ask for it, as they are into the first two planes; each
// thread later splits what it left itself.
template <typename T>
__device__ __forceinline__ void keep_row(const RowGemv& p, uint8_t* planes, const T* x, float inverse_rms,
                                         uint32_t& largest) {
  const uint32_t words = p.in / 8;
#pragma unroll 1
  for (uint32_t first = threadIdx.x; first < words; first += kBatch * blockDim.x) {
    uint4 batch[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      batch[b] = reinterpret_cast<const uint4*>(x)[min(first + b * blockDim.x, words - 1)];
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const uint32_t i = first + b * blockDim.x;
      if (i >= words) break;
      if (p.extras.norm != NormKind::kNone) {
        auto& eight = reinterpret_cast<Eight<T>&>(batch[b]);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          eight.value[k] = normed(eight.value[k], inverse_rms, p.extras.norm_weight, 8 * i + k, p.extras.norm);
        }
      }
      take_largest(largest, batch[b]);
      *reinterpret_cast<uint2*>(planes + 8 * i) = make_uint2(batch[b].x, batch[b].y);
      *reinterpret_cast<uint2*>(planes + p.x_stride + 8 * i) = make_uint2(batch[b].z, batch[b].w);
    }
  }
}

template <typename T>
__device__ __forceinline__ void split_row(const RowGemv& p, uint8_t* planes, float inverse) {
  for (uint32_t i = threadIdx.x; i < p.in / 8; i += blockDim.x) {
    uint2* const at = reinterpret_cast<uint2*>(planes + 8 * i);
    uint2* const next = reinterpret_cast<uint2*>(planes + p.x_stride + 8 * i);
    const uint4 words = make_uint4(at->x, at->y, next->x, next->y);
    const Eight<T> eight = reinterpret_cast<const Eight<T>&>(words);
    uint32_t split[2][kPlanes];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t bits[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) bits[k] = __float_as_uint(fmaf(to_float(eight.value[4 * h + k]), inverse, kMagicX));
      planes_of(split[h], bits);
    }
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      *reinterpret_cast<uint2*>(planes + plane * p.x_stride + 8 * i) = make_uint2(split[0][plane], split[1][plane]);
    }
  }
}

// 1 / rms of the only row of x; all threads.
template <typename T>
__device__ __forceinline__ float inverse_rms_of(const RowGemv& p, const T* x, float* scratch) {
  float squares = 0.f;
  for (uint32_t i = threadIdx.x; i < p.in / 8; i += blockDim.x) {
    const Eight<T> eight = reinterpret_cast<const Eight<T>*>(x)[i];
#pragma unroll
    for (int k = 0; k < 8; ++k) squares += to_float(eight.value[k]) * to_float(eight.value[k]);
  }
  return rsqrtf(block_sum(squares, scratch) / p.in + p.extras.eps);
}

// planes [rows][kPlanes][x_stride] and d [rows] of x [rows, in]. All threads; `largest` [rows] must be zeros, and the
// block synchronises afterwards.
template <typename T>
__device__ __forceinline__ void split_x(const RowGemv& p, uint8_t* planes, float* d, uint32_t* largest, const T* x,
                                        float* scratch) {
  const bool norm = p.extras.norm != NormKind::kNone;
  const float inverse_rms = norm ? inverse_rms_of(p, x, scratch) : 0.f;
  const uint32_t of_row = kPlanes * p.x_stride;
#pragma unroll 1
  for (int row = 0; row < p.rows; ++row) {
    uint32_t mine = 0;
    keep_row(p, planes + row * of_row, x + uint64_t(row) * p.in, inverse_rms, mine);
    mine = __reduce_max_sync(~0u, mine);
    if (threadIdx.x % 32 == 0) atomicMax(largest + row, mine);
  }
  __syncthreads();
#pragma unroll 1
  for (int row = 0; row < p.rows; ++row) {
    float scale;
    const float inverse = scale_of<T>(scale, largest[row]);
    split_row<T>(p, planes + row * of_row, inverse);
    if (threadIdx.x == 0) d[row] = scale;
  }
}

}  // namespace localq::rowlut
