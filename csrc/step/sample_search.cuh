// What the last block of a launch of sample.cu finds: the bin of the next search, and the token in a bin.
#pragma once

#include "step/sample.cuh"

namespace localq::sampling {

// Shared bins = the histogram of all tokens; returns its weight.
__device__ inline unsigned long long load_histogram(const Work* work, Scratch& scratch) {
  for (int i = threadIdx.x; i < kBins; i += kThreads) {
    scratch.bins.weight[i] = __ldcg(&work->weight[i]);
    scratch.bins.count[i] = __ldcg(&work->count[i]);
  }
  unsigned long long sum = 0;
  for (int i = threadIdx.x; i < kBins; i += kThreads) sum += scratch.bins.weight[i];
  const unsigned long long before = sum_before(sum, scratch.warp_sum);
  if (threadIdx.x == kThreads - 1) scratch.found = before + sum;
  __syncthreads();
  const unsigned long long total = scratch.found;
  __syncthreads();
  return total;
}

// Leaves the search of `stage` to its launch. Falls back to the largest where nothing reaches the target.
__device__ inline void plan(const Context& c, Scratch& scratch, Stage stage, unsigned long long target) {
  const Place place = locate(scratch, stage == kTopK, target);
  if (threadIdx.x != 0) return;
  c.work->bin[stage] = place.bin;
  c.work->before_weight[stage] = place.before_weight;
  c.work->target[stage] = target - (stage == kTopK ? place.before_count : place.before_weight);
  if (place.bin == kNone) emit(c, c.work->top_id);
}

__device__ inline int64_t step_of(const Context& c) {
  return min(int64_t(__ldcg(c.s.step)), c.s.capacity - 1);
}

// The draw from a prefix of weight `kept` less its first tokens, of weight `excluded`. All threads of the last block.
__device__ inline void plan_draw(const Context& c, Scratch& scratch, unsigned long long kept,
                                 unsigned long long excluded) {
  const unsigned long long left = kept - excluded;
  const double threshold = __ldcg(c.s.uniforms + step_of(c)) * double(left);
  plan(c, scratch, kDraw, excluded + min(__double2ull_rd(threshold) + 1, max(left, 1ull)));
}

// `kept` is the weight of the prefix that the searches before `next` left. All threads of the last block.
__device__ inline void plan_next(const Context& c, Scratch& scratch, Stage next, unsigned long long kept) {
  if (next == kTopK) {
    const int64_t top_k = __ldcg(c.s.top_k);
    if (top_k < c.s.vocab) return plan(c, scratch, kTopK, top_k);
    next = kTopP;
  }
  const double top_p = __ldcg(c.s.floats + 1);
  if (next == kTopP && top_p < 1.0) {
    const unsigned long long target = __double2ull_ru(top_p * double(kept));
    return plan(c, scratch, kTopP, min(max(target, 1ull), kept));
  }
  const unsigned long long all = min(kept, __ldcg(&c.work->min_p_weight));
  if (c.s.excludes == nullptr || !__ldcg(c.s.excludes + step_of(c))) return plan_draw(c, scratch, all, 0);
  if (threadIdx.x == 0) c.work->kept = all;  // the share goes on
}

struct Found {
  unsigned long long rank;     // of the token, for a draw
  unsigned long long before;   // weight of the list before it
  unsigned long long through;  // weight of the list up to and including it
};

// Bits in which the listed ranks differ. All threads must call.
__device__ inline unsigned long long differing(const unsigned long long* list, int n, Scratch& scratch) {
  const unsigned long long first = __ldcg(list);
  unsigned long long bits = 0;
  for (int i = threadIdx.x; i < n; i += kThreads) bits |= __ldcg(list + i) ^ first;
  if (threadIdx.x == 0) scratch.found = 0;
  __syncthreads();
  if (bits != 0) atomicOr(&scratch.found, bits);
  __syncthreads();
  bits = scratch.found;
  __syncthreads();
  return bits;
}

// Shared bins = count and weight of the listed ranks that agree with `prefix` under `mask`, by the digit at `shift`.
__device__ inline void count_digits(const Context& c, const Settings& settings, Scratch& scratch, int n,
                                    unsigned long long prefix, unsigned long long mask, int shift) {
  for (int i = threadIdx.x; i < kBins; i += kThreads) scratch.bins.weight[i] = scratch.bins.count[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += kThreads) {
    const unsigned long long rank = __ldcg(c.list + i);
    if (((rank ^ prefix) & mask) != 0) continue;
    const int digit = int(rank >> shift) & (kBins - 1);
    const float x = score_of(~unsigned(rank >> kIdBits));
    atomicAdd(&scratch.bins.count[digit], 1u);
    add_shared(&scratch.bins.weight[digit], units(weight_of(x, settings), c.unit));
  }
  __syncthreads();
}

// The first listed token (top-k: the first score, with all that are equal) with which the target is reached.
__device__ inline Found search_list(const Context& c, const Settings& settings, Scratch& scratch, int n, Stage stage,
                                    unsigned long long target) {
  const int lowest = stage == kTopK ? kIdBits : 0;
  const unsigned long long bits = differing(c.list, n, scratch);
  int shift = max(lowest, 64 - __clzll(static_cast<long long>(bits)) - kDigit);
  unsigned long long prefix = 0, mask = 0, before = 0;
  Place place;
  while (true) {
    count_digits(c, settings, scratch, n, prefix, mask, shift);
    place = locate(scratch, stage == kTopK, target);
    const unsigned long long digit_mask = static_cast<unsigned long long>(kBins - 1) << shift;
    prefix = (prefix & ~digit_mask) | static_cast<unsigned long long>(place.bin) << shift;
    mask |= digit_mask;
    before += place.before_weight;
    target -= stage == kTopK ? place.before_count : place.before_weight;
    if (place.count == 1 || shift == lowest) break;
    shift = max(lowest, shift - kDigit);
  }
  for (int i = threadIdx.x; i < n; i += kThreads) {
    const unsigned long long rank = __ldcg(c.list + i);
    if (((rank ^ prefix) & mask) == 0 && stage == kDraw) scratch.found = rank;  // one token
  }
  __syncthreads();
  return {scratch.found, before, before + place.weight};
}

}  // namespace localq::sampling
