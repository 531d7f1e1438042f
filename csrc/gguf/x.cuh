// x of a product in shared memory: f16, scaled by a power of two so that the largest value of a row lies in [512,
// 1024), and the sums of its runs of columns.
//
// Scaled, x in bf16 has room in f16, and sums of 32 columns too. What is lost is below 2^-33 of the row's largest
// value.
#pragma once

#include "common/gemv.cuh"
#include "gguf/layout.cuh"

namespace localq::gguf {

constexpr int kMostRows = 8;

// Rows of x in shared memory, as a lane reads them. Rows that do not exist read as zeros.
struct X {
  const uint8_t* values;  // f16, row g, from the first column of the item
  const uint8_t* sums;  // f16, row g, from the first run of the item: high parts, and `low` bytes behind them low parts
  uint32_t low;
  bool is_row;
  const uint8_t* table;  // the block type's, in shared memory

  // Eight columns from `column` on, a multiple of 8.
  __device__ __forceinline__ uint4 eight(uint32_t column) const {
    return is_row ? words_at(values + 2 * column) : uint4{};
  }
  // Four columns from `column` on, a multiple of 4.
  __device__ __forceinline__ uint2 four(uint32_t column) const {
    return is_row ? *reinterpret_cast<const uint2*>(values + 2 * column) : uint2{};
  }
  // High and low parts of the sums of two runs from `run` on, a multiple of 2.
  __device__ __forceinline__ uint2 two_sums(uint32_t run) const {
    if (!is_row) return {};
    return {word_at(sums + 2 * run), word_at(sums + low + 2 * run)};
  }
};

// Bits of the largest magnitude of eight values.
template <typename T>
__device__ __forceinline__ uint32_t largest_bits(const Eight<T>& eight) {
  const uint4 words = as<uint4>(eight);
  uint32_t largest = 0;
  for (const uint32_t word : {words.x, words.y, words.z, words.w}) {
    largest = max(largest, max(word & 0x7fffu, word >> 16 & 0x7fffu));
  }
  return largest;
}

// The power of two that brings a magnitude to [512, 1024); 1 for zero and what is not finite.
__device__ __forceinline__ float scale_of(float magnitude) {
  const int exponent = int(as<uint32_t>(magnitude) >> 23) - 127;
  if (magnitude == 0.f || exponent == 128) return 1.f;
  return as<float>(uint32_t(min(9 - exponent, 100) + 127) << 23);
}

template <typename T>
__device__ __forceinline__ T of_bits(uint32_t bits) {
  return as<T>(uint16_t(bits));
}

// Where words of eight columns of x go, for columns that are stored in another order.
struct Places {
  const uint16_t* of_words;  // or null: in order

  __device__ __forceinline__ uint32_t operator()(uint32_t word) const {
    return of_words == nullptr ? word : of_words[word];
  }
};

// Copies `rows` rows of x [rows, in] to shared memory at `to`, `stride` bytes apart, a single row with its norm, scaled
// as f16; word i (8 columns) is stored as word place(i). factors[row]: what results are multiplied by. `scratch`: a
// float per warp; `largest`: [warps][kMostRows]. Called by all threads, after dependency_wait(); ends with a barrier.
template <typename T, typename Order>
__device__ __forceinline__ void stage_scaled(uint8_t* to, uint32_t stride, const T* x, int in, int rows,
                                             const Order& place, const GemvExtras& extras, float* scratch,
                                             uint32_t* largest, float* factors) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
#pragma unroll 1
  for (int row = 0; row < rows; ++row) {
    T* const staged = reinterpret_cast<T*>(to + row * stride);
    stage_x<kXInFlight>(staged, x + uint64_t(row) * in, in, extras, scratch, place);
    uint32_t most = 0;
    for (uint32_t i = threadIdx.x; i < uint32_t(in) / 8; i += blockDim.x) {  // each thread its own words
      most = max(most, largest_bits(reinterpret_cast<const Eight<T>*>(staged)[place(i)]));
    }
    most = __reduce_max_sync(~0u, most);
    if (lane == 0) largest[warp * kMostRows + row] = most;
  }
  __syncthreads();
#pragma unroll 1
  for (int row = 0; row < rows; ++row) {
    uint32_t most = 0;
    for (uint32_t i = 0; i < warps; ++i) most = max(most, largest[i * kMostRows + row]);
    const float scale = scale_of(to_float(of_bits<T>(most)));
    if (threadIdx.x == 0) factors[row] = 1.f / scale;
    uint8_t* const staged = to + row * stride;
    for (uint32_t i = threadIdx.x; i < uint32_t(in) / 8; i += blockDim.x) {
      const Eight<T> eight = reinterpret_cast<const Eight<T>*>(staged)[place(i)];
      Eight<__half> scaled;
#pragma unroll
      for (int k = 0; k < 8; ++k) scaled.value[k] = __float2half_rn(to_float(eight.value[k]) * scale);
      reinterpret_cast<Eight<__half>*>(staged)[place(i)] = scaled;
    }
  }
  __syncthreads();
}

// Sums of each run of kRun columns of the staged rows, as two halves whose sum has 22 bits: high parts, and `low` bytes
// behind them low parts; zeros behind the last run. The block must synchronize afterwards.
template <int kRun>
__device__ __forceinline__ void sum_columns(uint8_t* sums, uint32_t stride, uint32_t low, const uint8_t* x,
                                            uint32_t x_stride, int in, int rows) {
  const uint32_t runs = uint32_t(in) / kRun, filled = low / 2;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < rows * filled; i += blockDim.x) {
    const uint32_t row = i / filled, run = i % filled;
    const auto* from = reinterpret_cast<const Eight<__half>*>(x + row * x_stride + run * (2 * kRun));
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < kRun / 8 && run < runs; ++k) {
      const Eight<__half> eight = from[k];
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += to_float(eight.value[j]);
    }
    const __half high = __float2half_rn(sum);
    auto* const at = reinterpret_cast<__half*>(sums + row * stride + run * 2);
    *at = high;
    at[low / 2] = __float2half_rn(sum - to_float(high));
  }
}

}  // namespace localq::gguf
