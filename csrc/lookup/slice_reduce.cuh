// vq_gemv: from the sums of blocks to results. Adds the slices of a stripe in order, then applies the extras.
//
// The blocks of a stripe exchange sums through words of global memory (common/exchange.cuh). Each block stores its
// sums, then waits for those of the others at its own share of the results.
//
// Waiting requires that all blocks of a stripe run at once: a launch has no more blocks than multiprocessors, or the
// blocks of a stripe are consecutive.
#pragma once

#include "common/exchange.cuh"
#include "lookup/gemv.cuh"
#include "lookup/intrinsics.cuh"

namespace localq::vq {

// Results begin .. begin + count - 1 of the stripe, [unit][16][row of x].
struct Share {
  uint32_t begin, count;
};

// Result i of the stripe: its matrix, its row there and its row of x.
struct Result {
  uint32_t segment, o, row;
};

template <int kRows>
__device__ __forceinline__ Result result_at(const Arguments& p, const Span& span, uint32_t i) {
  const Place place = place_of(p, span, i / (kTile * kRows));
  return {place.segment, place.tile * kTile + i / kRows % kTile, i % kRows};
}

// The factor of the sum of result i of a share; i counts through all parts, and can exceed them.
template <int kRows>
__device__ __forceinline__ float weight_of(const Arguments& p, const Span& span, const Share& share, uint32_t i) {
  if (i >= share.count * p.parts) return 0.f;
  const bool second = i >= share.count;
  const Result result = result_at<kRows>(p, span, share.begin + (second ? i - share.count : i));
  const Segment& w = p.segment[second ? 1 : result.segment];
  if (result.o >= w.out) return 0.f;
  if (w.scales == nullptr) return w.factor;
  return w.factor * (p.scales_bf16 ? to_float(static_cast<const __nv_bfloat16*>(w.scales)[result.o])
                                   : to_float(static_cast<const __half*>(w.scales)[result.o]));
}

// Stores the block's sums for the others.
template <int kRows>
__device__ __forceinline__ void send(const Span& span, const Shared& s, uint32_t* mine) {
  for (uint32_t i = threadIdx.x; i < span.tiles * kTile * kRows; i += kThreads) {
    put(mine + i, word_of(s.sums[i]));
  }
}

// The sum of `count` <= kTogether slices of a result, in order; their words are `stride` apart.
__device__ __forceinline__ float received(uint32_t* words, uint32_t count, uint32_t stride) {
  uint32_t part[kTogether];
  bool here = false;
  while (!here) {
    here = true;
#pragma unroll
    for (uint32_t k = 0; k < kTogether; ++k) part[k] = get_if(k < count, words + k * stride);
#pragma unroll
    for (uint32_t k = 0; k < kTogether; ++k) here = here && part[k] != kVacant;
  }
  float sum = 0.f;
#pragma unroll
  for (uint32_t k = 0; k < kTogether; ++k) {
    if (k < count) words[k * stride] = kVacant;
    sum += __int_as_float(int(part[k]));
  }
  return sum;
}

// The share's results of all parts to `to` [kTogether slices each][part][count], weighted. `weight` is that of the
// thread's first result.
template <int kRows>
__device__ __forceinline__ void gather(const Arguments& p, const Span& span, const Share& share, float weight,
                                       uint32_t* stripe, float* to) {
  const uint32_t stride = p.tiles * kTile * kRows, count = share.count * p.parts;
  const uint32_t upper = share.begin + span.count * kTile * kRows - share.count;
  for (uint32_t item = threadIdx.x, i = item, first = 0;; item += kThreads, i += kThreads) {
    for (; i >= count && first < p.slices; first += kTogether) i -= count;
    if (first >= p.slices) return;
    if (item >= kThreads || i != item) weight = weight_of<kRows>(p, span, share, i);
    uint32_t* const words = stripe + first * stride + (i < share.count ? share.begin + i : upper + i);
    to[item] = weight * received(words, min(kTogether, p.slices - first), stride);
  }
}

template <typename T>
__device__ __forceinline__ float biased(const Segment& w, uint32_t o, float value) {
  return w.bias == nullptr ? value : value + to_float(static_cast<const T*>(w.bias)[o]);
}

// Result i of `gathered` [groups][count], whose groups are added in order.
__device__ __forceinline__ float gathered_at(const float* gathered, uint32_t groups, uint32_t count, uint32_t i) {
  float sum = gathered[i];
  for (uint32_t k = 1; k < groups; ++k) sum += gathered[k * count + i];
  return sum;
}

// `gathered`: [groups][part][result of the share].
template <typename T, int kRows>
__device__ __forceinline__ void write_results(const Arguments& p, const Span& span, const float* gathered,
                                              uint32_t groups, const Share& share, void* y) {
  const uint32_t count = share.count * p.parts;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < share.count; i += kThreads) {
    const Result result = result_at<kRows>(p, span, share.begin + i);
    const Segment& w = p.segment[result.segment];
    if (result.o >= w.out || result.row >= uint32_t(p.rows)) continue;
    float value = biased<T>(w, result.o, gathered_at(gathered, groups, count, i));
    if (p.parts == 2) {
      const float up = gathered_at(gathered, groups, count, share.count + i);
      value = activate(value, p.extras.activation) * biased<T>(p.segment[1], result.o, up);
    }
    const uint64_t at = uint64_t(result.row) * p.y_width + w.y_begin + result.o;
    write_value<T>(p.extras, at, value, y);
  }
}

// The block's share of the results of its stripe.
template <int kRows>
__device__ __forceinline__ Share share_of(const Arguments& p, const Span& span) {
  const uint32_t results = span.count * kTile * kRows, slice = slice_of(p);
  const uint32_t begin = over_slices(p, results * slice);
  return {begin, over_slices(p, results * (slice + 1)) - begin};
}

// Called after the last step, which ends with a barrier. `weight`: weight_of() the thread's first result.
template <typename T, int kRows>
__device__ __forceinline__ void join(const Arguments& p, const Span& span, const Shared& s, float weight, void* y) {
  const uint32_t slice = slice_of(p), stripe = stripe_of(p);
  const uint32_t stride = p.tiles * kTile * kRows, groups = (p.slices + kTogether - 1) / kTogether;
  const Share share = share_of<kRows>(p, span);
  if (p.slices == 1) {
    for (uint32_t i = threadIdx.x; i < share.count * p.parts; i += kThreads) {
      s.sums[i] *= i < kThreads ? weight : weight_of<kRows>(p, span, share, i);
    }
  } else {
    uint32_t* const meeting = p.meeting + uint64_t(stripe) * p.slices * stride;
    send<kRows>(span, s, meeting + slice * stride);
    __syncthreads();  // the sums are overwritten
    gather<kRows>(p, span, share, weight, meeting, s.sums);
  }
  __syncthreads();
  write_results<T, kRows>(p, span, s.sums, groups, share, y);
}

}  // namespace localq::vq
