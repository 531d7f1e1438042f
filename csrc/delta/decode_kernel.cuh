// The kernel of delta_decode (decode.cu).
#pragma once

#include "common/launch.h"
#include "delta/check.h"
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

// A channel of the convolution: its taps and last inputs, which no launch of this step writes before this one ends.
template <typename T>
struct Channel {
  int number;
  Run<T, 4> taps;
  T past[3];

  __device__ __forceinline__ Channel(const DeltaStep& step, int channel)
      : number(channel), taps(static_cast<const Run<T, 4>*>(step.taps)[channel]) {
    const T* from = static_cast<const T*>(step.columns) + 3 * channel;
    past[0] = from[0], past[1] = from[1], past[2] = from[2];
  }

  // Behind the convolution and silu, rounded as its model rounds it; `input` is the token's.
  __device__ __forceinline__ float convolved(T input) const {
    float sum = to_float(past[0]) * to_float(taps.value[0]);
    sum = fmaf(to_float(past[1]), to_float(taps.value[1]), sum);
    sum = fmaf(to_float(past[2]), to_float(taps.value[2]), sum);
    sum = rounded<T>(fmaf(to_float(input), to_float(taps.value[3]), sum));
    return rounded<T>(sum * sigmoid(sum));
  }

  // The columns move on by one token.
  __device__ __forceinline__ void shift(const DeltaStep& step, T input) const {
    T* to = static_cast<T*>(step.columns) + 3 * number;
    to[0] = past[1], to[1] = past[2], to[2] = input;
  }

  // The same in registers, and what they hold written: for tokens that may be rejected (verify_kernel.cuh).
  __device__ __forceinline__ void push(T input) {
    past[0] = past[1], past[1] = past[2], past[2] = input;
  }
  __device__ __forceinline__ void store(const DeltaStep& step) const {
    T* to = static_cast<T*>(step.columns) + 3 * number;
    to[0] = past[0], to[1] = past[1], to[2] = past[2];
  }
};

// A head behind its norm and gate, by one warp; what does not depend on the rule is loaded early.
template <typename T>
struct Ending {
  float weight[4], gate[4];

  __device__ __forceinline__ Ending(const DeltaStep& step, int head, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 32 * i + lane;
      weight[i] = to_float(static_cast<const T*>(step.norm)[at]);
      gate[i] = to_float(static_cast<const T*>(step.gates)[kDeltaDim * head + at]);
    }
  }

  __device__ __forceinline__ void finish(const DeltaStep& step, int head, int lane) const {
    float x[4], squares = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = __ldcg(step.heads + kDeltaDim * head + 32 * i + lane);
      squares = fmaf(x[i], x[i], squares);
    }
    const float scale = rsqrtf(warp_sum(squares) / kDeltaDim + step.eps);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float normed = rounded<T>(rounded<T>(x[i] * scale) * weight[i]);
      round_to(normed * gate[i] * sigmoid(gate[i]), static_cast<T*>(step.out)[kDeltaDim * head + 32 * i + lane]);
    }
  }
};

constexpr int kAhead = 3;  // words of 8 columns per thread that are loaded before x is there

// What norm(x) of the columns of a word is multiplied by, but for the division by the root of the mean of x x.
template <typename T>
struct Word {
  Eight<T> write, decay;  // the rows that give b and a
  float norm[8];

  __device__ __forceinline__ Word(const DeltaStep& step, int head, int word) {
    const int64_t at = int64_t(head) * (step.hidden / 8) + word;
    write = static_cast<const Eight<T>*>(step.write)[at], decay = static_cast<const Eight<T>*>(step.decay)[at];
    if (step.x_kind == NormKind::kOffset) {
      const auto* from = static_cast<const float4*>(step.x_norm) + 2 * word;
      const float4 low = from[0], high = from[1];
      norm[0] = low.x, norm[1] = low.y, norm[2] = low.z, norm[3] = low.w;
      norm[4] = high.x, norm[5] = high.y, norm[6] = high.z, norm[7] = high.w;
    } else {
      const Eight<T> from = static_cast<const Eight<T>*>(step.x_norm)[word];
#pragma unroll
      for (int i = 0; i < 8; ++i) norm[i] = to_float(from.value[i]);
    }
  }
};

// Sums over columns: x x, and the two products.
struct RowSums {
  float squares = 0.f, write = 0.f, decay = 0.f;

  template <typename T>
  __device__ __forceinline__ void add(const Eight<T>& x, const Word<T>& word) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float value = to_float(x.value[i]), weighted = value * word.norm[i];
      squares = fmaf(value, value, squares);
      write = fmaf(weighted, to_float(word.write.value[i]), write);
      decay = fmaf(weighted, to_float(word.decay.value[i]), decay);
    }
  }
};

struct Shared {
  float sums[kWarps][3];  // RowSums of a warp
  float q[kDeltaDim], k[kDeltaDim], v[kColumns];
  float lengths[3];                     // 1 / |q| / sqrt(128), 1 / |k|, q k of the two of length 1
  float products[kWarps][2][kColumns];  // of S with k and with q, over the keys of a warp
  bool last;
};

template <typename T>
__global__ void __launch_bounds__(kThreads, 2) delta_decode_kernel(const DeltaStep step) {
  __shared__ Shared shared;
  release_dependents();
  const Place at(blockIdx.x, step.shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* matrix = step.matrix + (int64_t(at.head) * kDeltaDim + warp * kKeys) * kDeltaDim + at.slice * kColumns + lane;
  const int q_first = at.key_head * kDeltaDim, k_first = (step.key_heads + at.key_head) * kDeltaDim;
  const int v_first = (2 * step.key_heads + at.head) * kDeltaDim + at.slice * kColumns;
  const int words = step.hidden / 8, last_word = words - 1, own = threadIdx.x;
  float s[kKeys];
#pragma unroll
  for (int i = 0; i < kKeys; ++i) s[i] = __ldcg(matrix + i * kDeltaDim);
  const Channel<T> key(step, own < kDeltaDim ? q_first + own : k_first + own - kDeltaDim), value(step, v_first + lane);
  const Word<T> ahead[kAhead] = {{step, at.head, min(own, last_word)},
                                 {step, at.head, min(own + kThreads, last_word)},
                                 {step, at.head, min(own + 2 * kThreads, last_word)}};
  dependency_wait();

  const auto* inputs = static_cast<const T*>(step.inputs);
  const auto* x = static_cast<const Eight<T>*>(step.x);
  const T key_input = inputs[key.number], value_input = inputs[value.number];
  Eight<T> xs[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) xs[i] = x[min(own + i * kThreads, last_word)];
  (own < kDeltaDim ? shared.q : shared.k)[own % kDeltaDim] = key.convolved(key_input);
  if (warp == 0) shared.v[lane] = value.convolved(value_input);
  RowSums sums;
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (own + i * kThreads < words) sums.add(xs[i], ahead[i]);
  }
  for (int word = own + kAhead * kThreads; word < words; word += kThreads) {
    sums.add(x[word], Word<T>(step, at.head, word));
  }
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
  sums.squares = warp_sum(sums.squares), sums.write = warp_sum(sums.write), sums.decay = warp_sum(sums.decay);
  if (lane == 0) {
    shared.sums[warp][0] = sums.squares, shared.sums[warp][1] = sums.write, shared.sums[warp][2] = sums.decay;
  }
  __syncthreads();

  const int last_head = at.key_head * step.shared + min(warp, step.shared - 1);
  const Ending<T> ending(step, last_head, lane);
  with_k = with_q = 0.f;
  sums = {};
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    with_k += shared.products[i][0][lane], with_q += shared.products[i][1][lane];
    sums.squares += shared.sums[i][0], sums.write += shared.sums[i][1], sums.decay += shared.sums[i][2];
  }
  const float inverse_rms = rsqrtf(sums.squares / step.hidden + step.x_eps);
  const float beta = sigmoid(sums.write * inverse_rms);
  const float kept = __expf(step.rates[at.head] * softplus(sums.decay * inverse_rms + step.offsets[at.head]));
  const float of_q = rsqrtf(shared.lengths[0] + kEpsilon) * rsqrtf(float(kDeltaDim));
  const float of_k = rsqrtf(shared.lengths[1] + kEpsilon);
  const float written = beta * (shared.v[lane] - kept * with_k * of_k);
  // What the head reads goes first, and its fence does not wait for the state, which nobody reads in this step.
  if (warp == 0) {
    const float read = fmaf(written, shared.lengths[2] * of_q * of_k, kept * with_q * of_q);
    __stcg(step.heads + at.head * kDeltaDim + at.slice * kColumns + lane, rounded<T>(read));
    __threadfence();
    __syncwarp();
    if (lane == 0) shared.last = atomicAdd(step.arrived + at.key_head, 1) == kSlices * step.shared - 1;
    value.shift(step, value_input);  // no other block reads them
  }
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    __stcg(matrix + i * kDeltaDim, fmaf(shared.k[warp * kKeys + i] * of_k, written, kept * s[i]));
  }

  // The last block of a key head: the columns of q and k, which all of them have read, may change now, and what they
  // wrote is whole.
  __syncthreads();
  if (!shared.last) return;
  __threadfence();
  if (warp < step.shared) ending.finish(step, last_head, lane);
  key.shift(step, key_input);
  if (threadIdx.x == 0) step.arrived[at.key_head] = 0;
}

}  // namespace localq::delta
