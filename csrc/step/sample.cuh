// Device side of sample.cu: the workspace; score, weight, bin and rank of a token; the search in bins.
#pragma once

#include <cfloat>

#include "common/launch.h"
#include "step/sampling.h"

namespace localq::sampling {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kBins = 1024;
constexpr int kDigit = 10;  // bits: kBins values
constexpr int kIdBits = 24;
constexpr float kNats = 32.f;
constexpr int kNone = -1;

enum Stage : int { kTopK = 0, kTopP = 1, kXtc = 2, kDraw = 3, kStages = 4 };

// Start of the workspace; the list of u64 [vocab] follows.
struct Work {
  unsigned long long weight[kBins];
  unsigned count[kBins];
  unsigned long long min_p_weight;  // of all tokens that min-p keeps
  unsigned long long kept;          // of the tokens that XTC chooses among; 0: it does not act
  unsigned long long above;         // of those that reach its threshold, accumulated by the blocks
  unsigned long long best;          // ordered score and inverted id of the largest, accumulated by the blocks
  unsigned long long before_weight[kStages];
  unsigned long long before_count[kStages];
  unsigned long long target[kStages];
  int bin[kStages];  // kNone: nothing to do
  float top;         // the largest score
  int top_id;
  unsigned not_finite;
  unsigned listed;
  unsigned arrived;
  int finished;  // chosen without a draw
};

struct Context {
  Sample s;
  Work* work;
  unsigned long long* list;
  float inverse_cap;
  double unit;  // 2^shift
};

struct Settings {
  double temperature, min_p;
  float top, per_nat;
};

struct Bins {
  unsigned long long weight[kBins];
  unsigned count[kBins];
};

struct Place {
  int bin;  // kNone: the whole is below the target
  unsigned long long before_weight, weight;
  unsigned before_count, count;
};

struct Scratch {
  Bins bins;
  unsigned long long warp_sum[kWarps];
  Place place;
  unsigned long long found;
  bool last;
};

__device__ __forceinline__ float soft_capped(float x, float softcap, float inverse_cap) {
  return softcap > 0.f ? tanhf(x * inverse_cap) * softcap : x;
}

__device__ __forceinline__ float penalized(float x, bool seen, float penalty) {
  if (!seen) return x;
  return x < 0.f ? x * penalty : __fdiv_rn(x, penalty);
}

__device__ __forceinline__ float penalty_of(const Context& c) {
  return c.s.adjusted ? 1.f : float(__ldcg(c.s.floats + 3));
}

__device__ __forceinline__ float capped(const Context& c, int i) {
  return soft_capped(__ldcg(c.s.logits + i), c.s.softcap, c.inverse_cap);
}

__device__ __forceinline__ float score(const Context& c, int i, float penalty) {
  return penalized(capped(c, i), __ldcg(c.s.seen + i), penalty);
}

// Rises with the score; -0 and 0 are equal.
__device__ __forceinline__ unsigned ordered(float x) {
  const unsigned bits = x == 0.f ? 0u : __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float score_of(unsigned key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Rises along the order of the draw: falling score, rising id.
__device__ __forceinline__ unsigned long long rank_of(float x, int id) {
  return static_cast<unsigned long long>(~ordered(x)) << kIdBits | unsigned(id);
}

__device__ __forceinline__ double weight_of(float x, const Settings& settings) {
  return exp(double(x - settings.top) / settings.temperature);
}

__device__ __forceinline__ unsigned long long units(double weight, double unit) {
  return weight > 0.0 ? __double2ull_rn(weight * unit) : 0ull;  // NaN: scores that the penalty made infinite
}

__device__ __forceinline__ int bin_of(float x, const Settings& settings) {
  return int(fminf((settings.top - x) * settings.per_nat, float(kBins - 1)));
}

__device__ __forceinline__ Settings settings_of(const Context& c) {
  Settings settings;
  settings.temperature = __ldcg(c.s.floats);
  settings.min_p = __ldcg(c.s.floats + 2);
  settings.top = __ldcg(&c.work->top);
  settings.per_nat = float(fmin(kBins / (kNats * settings.temperature), double(FLT_MAX)));
  return settings;
}

// True in all threads of the block that arrives last, which then sees the writes of the others. Resets the counter.
__device__ __forceinline__ bool arrives_last(Work* work, bool* last) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    *last = atomicAdd(&work->arrived, 1u) == gridDim.x - 1;
    if (*last) work->arrived = 0;
  }
  __syncthreads();
  __threadfence();
  return *last;
}

// True in a row behind one whose choice was not drafted. Uniform over blocks: not written in this launch.
__device__ __forceinline__ bool is_skipped(const Context& c) {
  return c.s.follows && __ldcg(c.s.diverged) != 0;
}

// One thread: the choice, and the state that advances with it.
__device__ __forceinline__ void emit(const Context& c, int choice) {
  const int token = choice < 0 ? 0 : choice;
  *c.s.chosen = choice;
  *c.s.token = token;
  c.s.seen[token] = 1;
  *c.s.step = __ldcg(c.s.step) + 1;
  if (c.s.position != nullptr) *c.s.position = __ldcg(c.s.position) + 1;
  if (c.s.diverged != nullptr) *c.s.diverged = c.s.draft == nullptr || __ldcg(c.s.draft) != choice;
}

// Adds to a sum in shared memory. A 64-bit add there is a compare-and-swap loop, a 32-bit add is not.
__device__ __forceinline__ void add_shared(unsigned long long* sum, unsigned long long value) {
  auto* halves = reinterpret_cast<unsigned*>(sum);
  const unsigned low = unsigned(value);
  const unsigned carry = atomicAdd(halves, low) > ~low;
  const unsigned high = unsigned(value >> 32) + carry;
  if (high != 0) atomicAdd(halves + 1, high);
}

// Sum of `value` over the preceding threads. Called by all threads.
__device__ __forceinline__ unsigned long long sum_before(unsigned long long value, unsigned long long* warp_sum) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned long long sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const unsigned long long other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();  // an earlier call may still be reading warp_sum
  if (lane == 31) warp_sum[warp] = sum;
  __syncthreads();
  for (int i = 0; i < warp; ++i) sum += warp_sum[i];
  return sum - value;
}

// The first bin at which the cumulative count (or weight) reaches `target`. Called by all threads, after the bins are
// complete.
__device__ inline Place locate(Scratch& scratch, bool by_count, unsigned long long target) {
  constexpr int kEach = kBins / kThreads;
  const int first = threadIdx.x * kEach;
  unsigned long long weight = 0, count = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    weight += scratch.bins.weight[first + i];
    count += scratch.bins.count[first + i];
  }
  if (threadIdx.x == 0) scratch.place.bin = kNone;
  unsigned long long before_weight = sum_before(weight, scratch.warp_sum);
  unsigned long long before_count = sum_before(count, scratch.warp_sum);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const unsigned long long w = scratch.bins.weight[first + i];
    const unsigned n = scratch.bins.count[first + i];
    const unsigned long long before = by_count ? before_count : before_weight;
    const unsigned long long here = by_count ? n : w;
    if (before < target && before + here >= target) {
      scratch.place = {first + i, before_weight, w, unsigned(before_count), n};
    }
    before_weight += w;
    before_count += n;
  }
  __syncthreads();
  const Place place = scratch.place;
  __syncthreads();
  return place;
}

}  // namespace localq::sampling
