// The system of every chunk and head, solved (prefill.cu).
#pragma once

#include "delta/tiles.cuh"

namespace localq::delta {

constexpr int kPrepareWarps = 8, kPrepareThreads = 32 * kPrepareWarps;
constexpr float kForgotten = -1e4f;  // a decay below it leaves nothing either: sums stay finite

template <typename T>
struct PrepareShared {
  T keys[kTile], others[kTile];                                         // others: q, then v
  uint4 high[kLowerBlocks][kWarpWords], low[kLowerBlocks][kWarpWords];  // -A, on the diagonal its inverse: operands B
  float diagonal[kBlocks][kBlock][kBlock + 1];                          // I + A below the diagonal, then the inverse
  float since[2][kChunk];                                               // sums of decays, high and low
  float beta[kChunk], of_q[kChunk], of_k[kChunk];                       // 1 / |q| / sqrt(128), 1 / |k|
};

struct Sum {
  float high, low;
};
// The sum of two sums, its error in `low`.
__device__ __forceinline__ Sum operator+(const Sum& a, const Sum& b) {
  const float sum = a.high + b.high, of_b = sum - a.high;
  const float error = (a.high - (sum - of_b)) + (b.high - of_b) + (a.low + b.low);
  const float high = sum + error;
  return {high, error - (high - sum)};
}

// Betas, and the sums of decays to every token, by one warp; a lane has two tokens. Tokens behind the last write
// nothing and forget nothing.
template <typename T>
__device__ __forceinline__ void sum_decays(PrepareShared<T>& shared, const DeltaPass& pass, int first, int head) {
  const int heads = pass.key_heads * pass.shared, lane = threadIdx.x % 32;
  Sum sums[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = first + 2 * lane + i;
    float beta = 0.f;
    if (token < pass.tokens) {
      const int64_t at = int64_t(token) * heads + head;
      beta = rounded<T>(sigmoid(to_float(static_cast<const T*>(pass.write)[at])));
      const float decay =
          pass.rates[head] * softplus(to_float(static_cast<const T*>(pass.decay)[at]) + pass.offsets[head]);
      sums[i].high = decay < kForgotten ? kForgotten : decay;
    }
    shared.beta[2 * lane + i] = beta;
  }
  const Sum own = sums[0] + sums[1];
  Sum all = own;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const int from = max(lane - lanes, 0);
    const Sum before = {__shfl_sync(~0u, all.high, from), __shfl_sync(~0u, all.low, from)};
    if (lane >= lanes) all = before + all;
  }
  const int from = max(lane - 1, 0);
  Sum before = {__shfl_sync(~0u, all.high, from), __shfl_sync(~0u, all.low, from)};
  if (lane == 0) before = {};
  const Sum middle = before + sums[0];
  shared.since[0][2 * lane] = middle.high, shared.since[1][2 * lane] = middle.low;
  shared.since[0][2 * lane + 1] = all.high, shared.since[1][2 * lane + 1] = all.low;
}

// exp of the decays behind token `from` up to `to`.
template <typename T>
__device__ __forceinline__ float kept_between(const PrepareShared<T>& shared, int to, int from) {
  return __expf((shared.since[0][to] - shared.since[0][from]) + (shared.since[1][to] - shared.since[1][from]));
}

// The inverse lengths of k and q: two threads a row, whose words take different banks.
template <typename T>
__device__ __forceinline__ void measure(PrepareShared<T>& shared) {
  const int row = threadIdx.x / 2 % kChunk, half = threadIdx.x % 2;
  const bool is_q = threadIdx.x >= 2 * kChunk;
  const auto* words = reinterpret_cast<const Run<T, 8>*>(is_q ? shared.others : shared.keys);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const Run<T, 8> of = words[word_of(row, 8 * half + (i ^ 4 * half))];
#pragma unroll
    for (int j = 0; j < 8; ++j) sum = fmaf(to_float(of.value[j]), to_float(of.value[j]), sum);
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  const float inverse = rsqrtf(sum + kEpsilon);
  if (half == 0 && is_q) shared.of_q[row] = inverse * rsqrtf(float(kDeltaDim));
  if (half == 0 && !is_q) shared.of_k[row] = inverse;
}

// One block of 16 x 16 of k k^T (to the system) or of q k^T (to the scores); i and j of its first tokens.
template <typename T>
__device__ __forceinline__ void multiply(PrepareShared<T>& shared, bool is_score, int i, int j, uint4* scores) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const T* const left = is_score ? shared.others : shared.keys;
  float sums[2][4] = {};
#pragma unroll
  for (int step = 0; step < kGroups; ++step) {
    uint32_t a[4], b[4];
    load_a(a, left, kBlock * i, 2 * step, lane);
    load_b(b, shared.keys, kBlock * j, 2 * step, lane);
    mma(sums[0], a, b[0], b[1], T());
    mma(sums[1], a, b[2], b[3], T());
  }
#pragma unroll
  for (int part = 0; part < 8; ++part) {
    const int to = kBlock * i + g + part / 2 % 2 * 8, from = kBlock * j + part / 4 * 8 + 2 * t + part % 2;
    float& sum = sums[part / 4][part % 4];
    const bool seen = is_score ? from <= to : from < to;
    const float factor = (is_score ? shared.of_q[to] : shared.beta[to] * shared.of_k[to]) * shared.of_k[from];
    sum = seen ? sum * factor * kept_between(shared, to, from) : 0.f;
    if (!is_score && i == j) shared.diagonal[i][to % kBlock][from % kBlock] = sum;
  }
  if (i == j && !is_score) return;  // for `invert`
  const float sign = is_score ? 1.f : -1.f;
  uint4 high, low;
  split<T>(sign * sums[0][0], sign * sums[0][1], high.x, low.x);
  split<T>(sign * sums[1][0], sign * sums[1][1], high.y, low.y);
  split<T>(sign * sums[0][2], sign * sums[0][3], high.z, low.z);
  split<T>(sign * sums[1][2], sign * sums[1][3], high.w, low.w);
  const int at = lower(i, j) * kWarpWords + lane;
  if (is_score) {
    scores[at] = high, scores[at + kLowerBlocks * kWarpWords] = low;
  } else {
    shared.high[lower(i, j)][lane] = high, shared.low[lower(i, j)][lane] = low;
  }
}

// A block of the diagonal inverted in f32 by a warp, a column for each of 16 lanes, and as operand B.
template <typename T>
__device__ __forceinline__ void invert(PrepareShared<T>& shared, int block) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  auto& matrix = shared.diagonal[block];
  float column[kBlock];
#pragma unroll
  for (int row = 0; row < kBlock; ++row) {
    float value = row == lane % kBlock ? 1.f : 0.f;
#pragma unroll
    for (int i = 0; i < row; ++i) value = fmaf(-matrix[row][i], column[i], value);
    column[row] = value;
  }
  __syncwarp();
  if (lane < kBlock) {
#pragma unroll
    for (int row = 0; row < kBlock; ++row) matrix[row][lane] = column[row];
  }
  __syncwarp();
  uint4 high, low;
  split<T>(matrix[g][2 * t], matrix[g][2 * t + 1], high.x, low.x);
  split<T>(matrix[g][2 * t + 8], matrix[g][2 * t + 9], high.y, low.y);
  split<T>(matrix[g + 8][2 * t], matrix[g + 8][2 * t + 1], high.z, low.z);
  split<T>(matrix[g + 8][2 * t + 8], matrix[g + 8][2 * t + 9], high.w, low.w);
  shared.high[lower(block, block)][lane] = high, shared.low[lower(block, block)][lane] = low;
}

// sums += a b for 16 columns of tokens, without the product of the two low halves.
template <typename T>
__device__ __forceinline__ void add_product(float (&sums)[2][4], const Split& a, const uint4& high, const uint4& low) {
  mma(sums[0], a.high, high.x, high.y, T());
  mma(sums[1], a.high, high.z, high.w, T());
  mma(sums[0], a.low, high.x, high.y, T());
  mma(sums[1], a.low, high.z, high.w, T());
  mma(sums[0], a.high, low.x, low.y, T());
  mma(sums[1], a.high, low.z, low.w, T());
}

// X^T of 16 values (U) or keys (W): (I + A) X = right sides, block after block of tokens.
template <bool kIsKeys, typename T>
__device__ __forceinline__ void solve(const PrepareShared<T>& shared, int group, uint4* to) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const T* const tile = kIsKeys ? shared.keys : shared.others;
  Split solved[kBlocks - 1];
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    float sums[2][4], found[2][4] = {};
#pragma unroll
    for (int part = 0; part < 8; ++part) {
      const int token = kBlock * i + part / 4 * 8 + 2 * t + part % 2, word = 2 * group + part / 2 % 2;
      float factor = shared.beta[token];
      if (kIsKeys) factor *= shared.of_k[token] * __expf(shared.since[0][token] + shared.since[1][token]);
      sums[part / 4][part % 4] = factor * to_float(tile[8 * word_of(token, word) + g]);
    }
#pragma unroll
    for (int j = 0; j < i; ++j) {
      add_product<T>(sums, solved[j], shared.high[lower(i, j)][lane], shared.low[lower(i, j)][lane]);
    }
    const int own = lower(i, i);
    add_product<T>(found, split<T>(sums[0], sums[1]), shared.high[own][lane], shared.low[own][lane]);
    const Split result = split<T>(found[0], found[1]);
    if (i < kBlocks - 1) solved[i] = result;
    if constexpr (kIsKeys) {
      constexpr uint32_t kSigns = 0x80008000u;
      uint32_t high[4], low[4];
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        high[word] = transposed(result.high[word] ^ kSigns), low[word] = transposed(result.low[word] ^ kSigns);
      }
      uint4* const at = to + (group * kBlocks + i) * kWarpWords + lane;
      at[0] = {high[0], high[1], high[2], high[3]};
      at[kGroups * kBlocks * kWarpWords] = {low[0], low[1], low[2], low[3]};
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        to[(group * 2 * kBlocks + 2 * i + half) * kWarpWords + lane] = {
            __float_as_uint(found[half][0]), __float_as_uint(found[half][1]), __float_as_uint(found[half][2]),
            __float_as_uint(found[half][3])};
      }
    }
  }
}

// A block for each chunk and value head.
template <typename T>
__global__ void __launch_bounds__(kPrepareThreads) delta_prepare_kernel(const DeltaPass pass, const Part part) {
  auto& shared = *reinterpret_cast<PrepareShared<T>*>(shared_memory());
  release_dependents();
  const int heads = pass.key_heads * pass.shared, tiles = 2 * pass.key_heads + heads;
  const int chunk = blockIdx.x / heads, head = blockIdx.x % heads, key_head = head / pass.shared;
  const int warp = threadIdx.x / 32;
  const Workspace space(pass.workspace, pass.chunks, pass.key_heads, heads);
  const uint8_t* const of_chunk = space.tiles + int64_t(chunk) * tiles * Workspace::kTileBytes;
  const int64_t place = int64_t(chunk) * heads + head;
  dependency_wait();

  const auto copy_tile = [&](T* to, int tile) {
    copy_words<kPrepareThreads, kTile / 8>(to, of_chunk + int64_t(tile) * Workspace::kTileBytes);
  };
  copy_tile(shared.keys, pass.key_heads + key_head);
  copy_tile(shared.others, key_head);
  if (warp == 0) sum_decays(shared, pass, part.first + chunk * kChunk, head);
  wait_for_copies();
  __syncthreads();
  measure(shared);
  __syncthreads();

  auto* const scores = reinterpret_cast<uint4*>(space.scores + place * Workspace::kScoresBytes);
  for (int number = warp; number < 2 * kLowerBlocks; number += kPrepareWarps) {
    const int at = number % kLowerBlocks, i = at >= 6 ? 3 : at >= 3 ? 2 : at >= 1 ? 1 : 0;
    multiply(shared, number >= kLowerBlocks, i, at - lower(i, 0), scores);
  }
  __syncthreads();

  copy_tile(shared.others, 2 * pass.key_heads + head);
  if (warp < kBlocks) invert(shared, warp);
  auto& factors = reinterpret_cast<Factors*>(space.factors)[place];
  if (const int token = int(threadIdx.x) - kPrepareThreads / 2; token >= 0 && token < kChunk) {
    const float since = __expf(shared.since[0][token] + shared.since[1][token]);
    factors.out[token] = since * shared.of_q[token];
    factors.until[token] = kept_between(shared, kChunk - 1, token) * shared.of_k[token];
    if (token == kChunk - 1) {
#pragma unroll
      for (float& kept : factors.kept) kept = since;
    }
  }
  wait_for_copies();
  __syncthreads();
  solve<false>(shared, warp, reinterpret_cast<uint4*>(space.writes + place * Workspace::kWritesBytes));
  solve<true>(shared, warp, reinterpret_cast<uint4*>(space.reads + place * Workspace::kReadsBytes));
}

}  // namespace localq::delta
