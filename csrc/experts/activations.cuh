// gemv.cuh: x to shared memory, as the Format multiplies it.
#pragma once

#include <type_traits>

#include "experts/gemv.cuh"

namespace localq {

// The largest value of the block, the same in every thread. `scratch` has one float per warp; all threads must call.
__device__ __forceinline__ float block_max(float value, float* scratch) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, step));
  __syncthreads();  // scratch may still be read
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  for (int warp = 0; warp < kBlockWarps; ++warp) value = fmaxf(value, scratch[warp]);
  return value;
}

template <typename T>
__device__ __forceinline__ float largest_of(const Eight<T>& eight) {
  float largest = 0.f;
#pragma unroll
  for (int k = 0; k < 8; ++k) largest = fmaxf(largest, fabsf(to_float(eight.value[k])));
  return largest;
}

// The power of two that brings `largest` to 2^14 .. 2^15, so that all of x down to 2^-28 of it keeps its bits in f16.
__device__ __forceinline__ float half_factor(float largest) {
  const int exponent = int(__float_as_uint(largest) >> 23) - 127;  // of infinity 128
  return __uint_as_float(uint32_t(127 + min(14 - exponent, 100)) << 23);
}

// Where column c of 8 lies, two to a word: 0 and 4, 1 and 5, 2 and 6, 3 and 7, as MXFP4 is decoded.
template <typename T>
__device__ __forceinline__ Eight<__half> in_half(const Eight<T>& eight, float factor) {
  Eight<__half> out;
#pragma unroll
  for (int k = 0; k < 8; ++k) round_to(to_float(eight.value[k]) * factor, out.value[k % 4 * 2 + k / 4]);
  return out;
}

// x T [x_rows, in] to shared memory, row by row, one row with its norm; in f16 and in pairs where the format wants
// that. Returns what the sums have to be multiplied with. All threads; afterwards the block must synchronise.
template <typename Format, typename T>
__device__ __forceinline__ float stage_block_x(const BlockGemv& p, const BlockShared& s, const T* x) {
  if (p.x_stride == 0) return 1.f;
  const uint32_t words = p.in / 8, all = p.x_rows * words;
  const auto place = [&](uint32_t i) { return s.x + i / words * p.x_stride + i % words * 16; };
  if (p.extras.norm != NormKind::kNone) {
    stage_x(reinterpret_cast<T*>(s.x), x, p.in, p.extras,
            s.scratch);  // one row, each thread the words that it has below
  } else {
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < all; i += kBlockThreads) {
      *reinterpret_cast<Eight<T>*>(place(i)) = reinterpret_cast<const Eight<T>*>(x)[i];
    }
  }
  if constexpr (!Format::kHalfX) {
    return 1.f;
  } else {
    float factor = 1.f;
    if constexpr (!std::is_same<T, __half>::value) {
      float largest = 0.f;
      for (uint32_t i = threadIdx.x; i < all; i += kBlockThreads) {
        largest = fmaxf(largest, largest_of(*reinterpret_cast<const Eight<T>*>(place(i))));
      }
      factor = half_factor(block_max(largest, s.scratch));
    }
    for (uint32_t i = threadIdx.x; i < all; i += kBlockThreads) {  // each thread what it wrote itself
      *reinterpret_cast<Eight<__half>*>(place(i)) = in_half(*reinterpret_cast<const Eight<T>*>(place(i)), factor);
    }
    const uint32_t rest = p.x_stride / 16 - words;
    for (uint32_t i = threadIdx.x; i < p.x_rows * rest; i += kBlockThreads) {
      *reinterpret_cast<uint4*>(s.x + i / rest * p.x_stride + (words + i % rest) * 16) = uint4{};
    }
    if (threadIdx.x < Format::kSteps * 16) reinterpret_cast<uint4*>(const_cast<uint8_t*>(s.zeros))[threadIdx.x] = {};
    return 1.f / factor;
  }
}

}  // namespace localq
