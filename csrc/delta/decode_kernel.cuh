// The kernel of delta_decode (decode.cu).
#pragma once

#include "common/launch.h"
#include "delta/delta.h"
#include "delta/functions.cuh"

namespace localq::delta {

constexpr int kColumns = 32;                       // values per block, one per lane
constexpr int kSlices = kDeltaDim / kColumns;      // blocks per value head
constexpr int kWarps = 8, kThreads = 32 * kWarps;  // a warp has 16 keys
constexpr int kKeys = kDeltaDim / kWarps;
static_assert(kMostShared == kWarps);  // value heads of a key head: each has a warp at the end

// The place of a block: its key head and value head, and the first of its values.
struct Place {
  int key_head, head, slice;
  __device__ __forceinline__ Place(int block, int shared)
      : key_head(block / kSlices / shared), head(block / kSlices), slice(block % kSlices) {
  }
};

// A channel behind the convolution and silu, rounded as its model rounds it.
template <typename T>
__device__ __forceinline__ float convolved(const DeltaStep& step, int channel) {
  const auto weights = reinterpret_cast<const Run<T, 4>*>(step.taps)[channel];
  const T* past = static_cast<const T*>(step.columns) + 3 * channel;
  float sum = to_float(past[0]) * to_float(weights.value[0]);
  sum = fmaf(to_float(past[1]), to_float(weights.value[1]), sum);
  sum = fmaf(to_float(past[2]), to_float(weights.value[2]), sum);
  sum = fmaf(to_float(static_cast<const T*>(step.inputs)[channel]), to_float(weights.value[3]), sum);
  sum = rounded<T>(sum);
  return rounded<T>(sum * sigmoid(sum));
}

// The columns of a channel move on by one token.
template <typename T>
__device__ __forceinline__ void shift(const DeltaStep& step, int channel) {
  T* past = static_cast<T*>(step.columns) + 3 * channel;
  past[0] = past[1], past[1] = past[2], past[2] = static_cast<const T*>(step.inputs)[channel];
}

// A head behind its norm and gate, by one warp.
template <typename T>
__device__ __forceinline__ void finish(const DeltaStep& step, int head, int lane) {
  float x[4], squares = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = __ldcg(step.heads + kDeltaDim * head + 32 * i + lane);
    squares = fmaf(x[i], x[i], squares);
  }
  const float scale = rsqrtf(warp_sum(squares) / kDeltaDim + step.eps);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = 32 * i + lane;
    const float normed = rounded<T>(rounded<T>(x[i] * scale) * to_float(static_cast<const T*>(step.norm)[at]));
    const float z = to_float(static_cast<const T*>(step.gates)[kDeltaDim * head + at]);
    round_to(normed * z * sigmoid(z), static_cast<T*>(step.out)[kDeltaDim * head + at]);
  }
}

struct Shared {
  float q[kDeltaDim], k[kDeltaDim], v[kColumns];
  float lengths[3];                     // 1 / |q| / sqrt(128), 1 / |k|, q k of the two of length 1
  float products[kWarps][2][kColumns];  // of S with k and with q, over the keys of a warp
  bool last;
};

template <typename T>
__global__ void __launch_bounds__(kThreads) delta_decode_kernel(const DeltaStep step) {
  __shared__ Shared shared;
  release_dependents();
  const Place at(blockIdx.x, step.shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, heads = step.key_heads * step.shared;
  float* matrix = step.matrix + (int64_t(at.head) * kDeltaDim + warp * kKeys) * kDeltaDim + at.slice * kColumns + lane;
  dependency_wait();

  float s[kKeys];
#pragma unroll
  for (int i = 0; i < kKeys; ++i) s[i] = __ldcg(matrix + i * kDeltaDim);
  const int q_first = at.key_head * kDeltaDim, k_first = (step.key_heads + at.key_head) * kDeltaDim;
  const int v_first = (2 * step.key_heads + at.head) * kDeltaDim + at.slice * kColumns;
  if (threadIdx.x < kDeltaDim) {
    shared.q[threadIdx.x] = convolved<T>(step, q_first + threadIdx.x);
  } else {
    shared.k[threadIdx.x - kDeltaDim] = convolved<T>(step, k_first + threadIdx.x - kDeltaDim);
  }
  if (warp == 0) shared.v[lane] = convolved<T>(step, v_first + lane);
  const float beta = rounded<T>(sigmoid(to_float(static_cast<const T*>(step.write)[at.head])));
  const float input = to_float(static_cast<const T*>(step.decay)[at.head]) + step.offsets[at.head];
  const float kept = __expf(step.rates[at.head] * softplus(input));
  __syncthreads();

  float with_k = 0.f, with_q = 0.f;
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    with_k = fmaf(s[i], shared.k[warp * kKeys + i], with_k);
    with_q = fmaf(s[i], shared.q[warp * kKeys + i], with_q);
  }
  shared.products[warp][0][lane] = with_k, shared.products[warp][1][lane] = with_q;
  if (warp < 3) {
    const float* left = warp == 1 ? shared.k : shared.q;
    const float* right = warp == 0 ? shared.q : shared.k;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kDeltaDim; i += 32) sum = fmaf(left[i + lane], right[i + lane], sum);
    sum = warp_sum(sum);
    if (lane == 0) shared.lengths[warp] = sum;
  }
  __syncthreads();

  with_k = with_q = 0.f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) with_k += shared.products[i][0][lane], with_q += shared.products[i][1][lane];
  const float of_q = rsqrtf(shared.lengths[0] + kEpsilon) * rsqrtf(float(kDeltaDim));
  const float of_k = rsqrtf(shared.lengths[1] + kEpsilon);
  const float written = beta * (shared.v[lane] - kept * with_k * of_k);
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    __stcg(matrix + i * kDeltaDim, fmaf(shared.k[warp * kKeys + i] * of_k, written, kept * s[i]));
  }
  if (warp == 0) {
    const float read = fmaf(written, shared.lengths[2] * of_q * of_k, kept * with_q * of_q);
    __stcg(step.heads + at.head * kDeltaDim + at.slice * kColumns + lane, rounded<T>(read));
  }

  // The last block of a key head: what all of them have read may change now, and what they wrote is whole.
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) shared.last = atomicAdd(step.arrived + at.key_head, 1) == kSlices * step.shared - 1;
  __syncthreads();
  if (!shared.last) return;
  __threadfence();
  if (warp < step.shared) finish<T>(step, at.key_head * step.shared + warp, lane);
  shift<T>(step, threadIdx.x < kDeltaDim ? q_first + threadIdx.x : k_first + threadIdx.x - kDeltaDim);
  const int first = (2 * step.key_heads + at.key_head * step.shared) * kDeltaDim;
  for (int i = threadIdx.x; i < step.shared * kDeltaDim; i += kThreads) shift<T>(step, first + i);
  if (threadIdx.x == 0) step.arrived[at.key_head] = 0;
}

}  // namespace localq::delta
