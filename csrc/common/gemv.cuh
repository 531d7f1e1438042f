// Device side of gemv.h: staging x (with its norm) in shared memory, and the epilogue.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/gemv.h"

namespace localq {

__device__ __forceinline__ float to_float(__half value) {
  return __half2float(value);
}
__device__ __forceinline__ float to_float(__nv_bfloat16 value) {
  return __bfloat162float(value);
}
__device__ __forceinline__ void round_to(float from, __half& to) {
  to = __float2half_rn(from);
}
__device__ __forceinline__ void round_to(float from, __nv_bfloat16& to) {
  to = __float2bfloat16_rn(from);
}

// 16 bytes of x.
template <typename T>
struct alignas(16) Eight {
  T value[8];
};

// Sum over the block, the same bits in every thread. `scratch` has one float per warp; all threads must call.
__device__ __forceinline__ float block_sum(float value, float* scratch) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  const int warps = (blockDim.x + 31) / 32;
  __syncthreads();  // scratch may still be read from the call before
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.f;
  for (int warp = 0; warp < warps; ++warp) sum += scratch[warp];
  return sum;
}

// One normed value, in the order of rounding that the family has.
template <typename T>
__device__ __forceinline__ T normed(T x, float inverse_rms, const void* weight, int i, NormKind kind) {
  T out;
  if (kind == NormKind::kPlain) {
    T quotient;
    round_to(to_float(x) * inverse_rms, quotient);
    round_to(to_float(quotient) * to_float(static_cast<const T*>(weight)[i]), out);
  } else {
    round_to(to_float(x) * inverse_rms * static_cast<const float*>(weight)[i], out);
  }
  return out;
}

// Words of 8 values stay where they are.
struct InOrder {
  __device__ __forceinline__ uint32_t operator()(uint32_t word) const {
    return word;
  }
};

constexpr int kXInFlight = 4;  // words, where a thread of a product has several to stage

// shared[0 .. in) = x, normed where `extras` asks for it; word i, of 8 values, is left as word order(i). in % 8 == 0,
// both 16-byte aligned. All threads must call; afterwards the block must synchronise. Call after dependency_wait().
// kInFlight: words that a thread asks for before it stores the first.
template <int kInFlight = 1, typename T, typename Order = InOrder>
__device__ __forceinline__ void stage_x(T* shared, const T* x, int in, const GemvExtras& extras, float* scratch,
                                        Order order = {}) {
  const auto* from = reinterpret_cast<const Eight<T>*>(x);
  auto* to = reinterpret_cast<Eight<T>*>(shared);
  float squares = 0.f;
  for (int first = threadIdx.x; first < in / 8; first += kInFlight * blockDim.x) {
    Eight<T> eights[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const int i = first + j * blockDim.x;
      eights[j] = i < in / 8 ? from[i] : Eight<T>{};
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const int i = first + j * blockDim.x;
      if (i >= in / 8) break;
      to[order(i)] = eights[j];
      if (extras.norm == NormKind::kNone) continue;
#pragma unroll
      for (int k = 0; k < 8; ++k) squares += to_float(eights[j].value[k]) * to_float(eights[j].value[k]);
    }
  }
  if (extras.norm == NormKind::kNone) return;
  const float inverse_rms = rsqrtf(block_sum(squares, scratch) / in + extras.eps);
  for (int i = threadIdx.x; i < in / 8; i += blockDim.x) {  // each thread what it wrote itself
    Eight<T> eight = to[order(i)];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      eight.value[k] = normed(eight.value[k], inverse_rms, extras.norm_weight, 8 * i + k, extras.norm);
    }
    to[order(i)] = eight;
  }
}

// Writes result `at` of y, T or f32: the residual is added, and the sum rounded once.
template <typename T>
__device__ __forceinline__ void write_value(const GemvExtras& extras, uint64_t at, float value, void* y) {
  if (extras.residual != nullptr) value += to_float(static_cast<const T*>(extras.residual)[at]);
  if (extras.y_is_f32) {
    static_cast<float*>(y)[at] = value;
  } else {
    round_to(value, static_cast<T*>(y)[at]);
  }
}

__device__ __forceinline__ float activate(float x, Activation kind) {
  if (kind == Activation::kSilu) return x / (1.f + __expf(-x));
  if (kind == Activation::kGelu) return 0.5f * x * (1.f + erff(x * 0.70710678118654752f));
  const float inner = 0.79788456080286536f * (x + 0.044715f * x * x * x);
  return 0.5f * x * (1.f + tanhf(inner));
}

}  // namespace localq
