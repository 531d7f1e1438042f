// The kernel of delta_verify (verify.cu).
#pragma once

#include "delta/decode_kernel.cuh"

namespace localq::delta {

constexpr int kMostReplayed = kMostDeltaRows - 1;
constexpr int kMostWalked = kMostReplayed + kMostDeltaRows;  // rows that a launch takes the state through

struct RowsShared {
  float sums[kMostDeltaRows][kWarps][3];  // RowSums of a warp
  float q[kMostDeltaRows][kDeltaDim], k[kMostWalked][kDeltaDim], v[kMostWalked][kColumns];
  float products[2][kWarps][2][kColumns];            // as of `Shared`; rows take turns
  float of_q[kMostDeltaRows], both[kMostDeltaRows];  // 1 / |q| / sqrt(128); q k
  float of_k[kMostWalked];                           // 1 / |k|
  float beta[kMostWalked], kept[kMostWalked];        // kept: what stays of the state
  bool last;
};

// The drafted rows of the step before that were accepted.
__device__ __forceinline__ int replayed_rows(const DeltaRows& step) {
  const int64_t accepted = *step.position - *step.first_drafted;
  return int(accepted < 0 ? 0 : accepted < step.drafted ? accepted : step.drafted);
}

// Sum over 128 products, by one warp.
__device__ __forceinline__ float dot(const float* left, const float* right, int lane) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kDeltaDim; i += 32) sum = fmaf(left[i + lane], right[i + lane], sum);
  return warp_sum(sum);
}

// What b and a of a row of this step make of the state, by one thread; `sums` of all warps.
__device__ __forceinline__ void set_rates(const DeltaRows& step, RowsShared& shared, Place at, int row, int replayed) {
  RowSums sums;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    const float* of = shared.sums[row][i];
    sums.squares += of[0], sums.write += of[1], sums.decay += of[2];
  }
  const float inverse_rms = rsqrtf(sums.squares / step.hidden + step.x_eps);
  const float beta = sigmoid(sums.write * inverse_rms);
  const float decay = step.rates[at.head] * softplus(sums.decay * inverse_rms + step.offsets[at.head]);
  shared.beta[replayed + row] = beta, shared.kept[replayed + row] = __expf(decay);
  if (at.slice == 0) {  // for the last block of the key head, which keeps them
    const int heads = step.key_heads * step.shared;
    __stcg(step.row_rates + 2 * row * heads + at.head, decay);
    __stcg(step.row_rates + (2 * row + 1) * heads + at.head, beta);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 2) delta_verify_kernel(const DeltaRows step) {
  __shared__ RowsShared shared;
  release_dependents();
  if (step.rows == 0) dependency_wait();  // no launch of a step is ahead of a replay
  const int replayed = replayed_rows(step), walked = replayed + step.rows, rows = step.rows;
  if (walked == 0) return;
  const Place at(blockIdx.x, step.shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own = threadIdx.x;
  const int heads = step.key_heads * step.shared, channels = (2 * step.key_heads + heads) * kDeltaDim;
  float* matrix = step.matrix + (int64_t(at.head) * kDeltaDim + warp * kKeys) * kDeltaDim + at.slice * kColumns + lane;
  const int q_first = at.key_head * kDeltaDim, k_first = (step.key_heads + at.key_head) * kDeltaDim;
  const int v_first = (2 * step.key_heads + at.head) * kDeltaDim + at.slice * kColumns;
  const bool has_q = own < kDeltaDim;
  float s[kKeys];
#pragma unroll
  for (int i = 0; i < kKeys; ++i) s[i] = __ldcg(matrix + i * kDeltaDim);
  Channel<T> key(step, has_q ? q_first + own : k_first + own - kDeltaDim), value(step, v_first + lane);
  T* const drafted = static_cast<T*>(step.drafted_inputs);
  for (int row = 0; row < replayed; ++row) {
    const T* const from = drafted + int64_t(row) * channels;
    const T key_input = from[key.number];
    if (!has_q) shared.k[row][own - kDeltaDim] = key.convolved(key_input);
    key.push(key_input);
    if (warp == 0) {
      const T value_input = from[value.number];
      shared.v[row][lane] = value.convolved(value_input);
      value.push(value_input);
    }
  }
  if (own < replayed) {
    shared.beta[own] = step.drafted_beta[own * heads + at.head];
    shared.kept[own] = __expf(step.drafted_decay[own * heads + at.head]);
  }
  dependency_wait();

  const auto* inputs = static_cast<const T*>(step.inputs);
  Channel<T> key_then = key, value_then = value;  // as they stay
  for (int row = 0; row < rows; ++row) {
    const T* const from = inputs + int64_t(row) * step.stride;
    const T key_input = from[key.number];
    (has_q ? shared.q[row] : shared.k[replayed + row])[own % kDeltaDim] = key.convolved(key_input);
    key.push(key_input);
    if (warp == 0) {
      const T value_input = from[value.number];
      shared.v[replayed + row][lane] = value.convolved(value_input);
      value.push(value_input);
    }
    if (row == 0) key_then = key, value_then = value;
  }
  if (rows > 0) {
    const auto* x = static_cast<const Eight<T>*>(step.x);
    const int words = step.hidden / 8;
    RowSums sums[kMostDeltaRows];
    for (int word = own; word < words; word += kThreads) {
      const Word<T> weights(step, at.head, word);
#pragma unroll
      for (int row = 0; row < kMostDeltaRows; ++row) {
        if (row < rows) sums[row].add(x[int64_t(row) * words + word], weights);
      }
    }
#pragma unroll
    for (int row = 0; row < kMostDeltaRows; ++row) {
      if (row >= rows) break;
      const float squares = warp_sum(sums[row].squares), write = warp_sum(sums[row].write);
      const float decay = warp_sum(sums[row].decay);
      float* const to = shared.sums[row][warp];
      if (lane == 0) to[0] = squares, to[1] = write, to[2] = decay;
    }
  }
  __syncthreads();

  for (int row = warp; row < walked; row += kWarps) {
    const int now = row - replayed;
    const float k_length = dot(shared.k[row], shared.k[row], lane);
    if (lane == 0) shared.of_k[row] = rsqrtf(k_length + kEpsilon);
    if (now < 0) continue;
    const float q_length = dot(shared.q[now], shared.q[now], lane), both = dot(shared.q[now], shared.k[row], lane);
    if (lane == 0) shared.of_q[now] = rsqrtf(q_length + kEpsilon) * rsqrtf(float(kDeltaDim)), shared.both[now] = both;
  }
  if (own < rows) set_rates(step, shared, at, own, replayed);
  __syncthreads();

  const int last_stored = rows > 0 ? replayed : replayed - 1;  // the row behind which the state stays
  float stored[kKeys];
  for (int row = 0; row < walked; ++row) {
    const int now = row - replayed, turn = row % 2;
    const float* const k = shared.k[row] + warp * kKeys;
    const float* const q = shared.q[max(now, 0)] + warp * kKeys;
    float with_k = 0.f, with_q = 0.f;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      with_k = fmaf(s[i], k[i], with_k);
      with_q = fmaf(s[i], q[i], with_q);
    }
    shared.products[turn][warp][0][lane] = with_k, shared.products[turn][warp][1][lane] = with_q;
    __syncthreads();  // who writes these places again has passed the barrier of the row between
    with_k = with_q = 0.f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      with_k += shared.products[turn][i][0][lane], with_q += shared.products[turn][i][1][lane];
    }
    const float kept = shared.kept[row], of_k = shared.of_k[row];
    const float written = shared.beta[row] * (shared.v[row][lane] - kept * with_k * of_k);
    if (warp == 0 && now >= 0) {
      const float of_q = shared.of_q[now];
      const float read = fmaf(written, shared.both[now] * of_q * of_k, kept * with_q * of_q);
      float* const to = step.heads + int64_t(now) * heads * kDeltaDim;
      __stcg(to + at.head * kDeltaDim + at.slice * kColumns + lane, rounded<T>(read));
    }
#pragma unroll
    for (int i = 0; i < kKeys; ++i) s[i] = fmaf(k[i] * of_k, written, kept * s[i]);
    if (row == last_stored) {
#pragma unroll
      for (int i = 0; i < kKeys; ++i) stored[i] = s[i];
    }
  }
  // As in delta_decode, the fence does not wait for the state.
  if (warp == 0) {
    __threadfence();
    __syncwarp();
    if (lane == 0) shared.last = atomicAdd(step.arrived + at.key_head, 1) == kSlices * step.shared - 1;
    value_then.store(step);  // no other block reads them, nor these inputs
    for (int row = 1; row < rows; ++row) {
      drafted[int64_t(row - 1) * channels + value.number] = inputs[int64_t(row) * step.stride + value.number];
    }
  }
#pragma unroll
  for (int i = 0; i < kKeys; ++i) __stcg(matrix + i * kDeltaDim, stored[i]);

  // The last block of a key head: all of them have read what is written now, and what they wrote is whole.
  __syncthreads();
  if (!shared.last) return;
  __threadfence();
  for (int task = warp; task < rows * step.shared; task += kWarps) {
    const int row = task / step.shared, head = at.key_head * step.shared + task % step.shared;
    DeltaStep of = step;
    of.gates = static_cast<const T*>(step.gates) + int64_t(row) * step.stride;
    of.heads = step.heads + int64_t(row) * heads * kDeltaDim;
    of.out = static_cast<T*>(step.out) + int64_t(row) * heads * kDeltaDim;
    Ending<T>(of, head, lane).finish(of, head, lane);
  }
  key_then.store(step);
  for (int row = 1; row < rows; ++row) {
    drafted[int64_t(row - 1) * channels + key.number] = inputs[int64_t(row) * step.stride + key.number];
  }
  for (int task = own; task < (rows - 1) * step.shared; task += kThreads) {
    const int row = task / step.shared, head = at.key_head * step.shared + task % step.shared;
    const float* const from = step.row_rates + 2 * (row + 1) * heads + head;
    step.drafted_decay[row * heads + head] = __ldcg(from), step.drafted_beta[row * heads + head] = __ldcg(from + heads);
  }
  if (own == 0) step.arrived[at.key_head] = 0;
}

}  // namespace localq::delta
