// vq_gemv: from the sums of a block to results: the slices of a stripe are added in their order, then comes what the
// extras ask for.
//
// With clusters the blocks of a stripe are one: each has a share of the results, and reads the sums of all through
// distributed shared memory; writing results goes on while the last of the others read. Elsewhere they meet in global
// memory, and the last to arrive adds up. Either way one order of additions, whoever comes when.
#pragma once

#include "vq_gemv.cuh"
#include "vq_machine.cuh"

namespace localq::vq {

// Sum i of a stripe: of its slices, in their order.
struct Slices {
  const float* sums;
  const float* partials;  // of the stripe, or null
  uint32_t count, stride;

  __device__ __forceinline__ float at(uint32_t i) const {
    if (count == 1) return sums[i];
    float part[kMostSlices], sum = 0.f;
#pragma unroll
    for (uint32_t k = 0; k < kMostSlices; ++k) {
      part[k] = 0.f;
      if (k < count) part[k] = partials == nullptr ? read_rank(sums + i, k) : __ldcg(partials + k * stride + i);
    }
#pragma unroll
    for (uint32_t k = 0; k < kMostSlices; ++k) sum += part[k];
    return sum;
  }
};

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

// What the sum of result i of a share is multiplied by; i counts through all parts, and may lie behind them.
template <int kRows>
__device__ __forceinline__ float weight_of(const Arguments& p, const Span& span, const Share& share, uint32_t i) {
  if (i >= share.count * p.parts) return 0.f;
  const bool second = i >= share.count;
  const Result result = result_at<kRows>(p, span, share.begin + (second ? i - share.count : i));
  const Segment& w = p.segment[second ? 1 : result.segment];
  if (result.o >= w.out) return 0.f;
  return w.factor * (p.scales_bf16 ? to_float(static_cast<const __nv_bfloat16*>(w.scales)[result.o])
                                   : to_float(static_cast<const __half*>(w.scales)[result.o]));
}

// The share's results of all parts to `to` [part][count], weighted. `weight` is that of the thread's first.
template <int kRows>
__device__ __forceinline__ void gather(const Arguments& p, const Span& span, const Slices& slices, const Share& share,
                                       float weight, float* to) {
  const uint32_t count = share.count * p.parts, upper = share.begin + span.count * kTile * kRows - share.count;
#pragma unroll 2
  for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
    if (i >= kThreads) weight = weight_of<kRows>(p, span, share, i);
    to[i] = weight * slices.at(i < share.count ? share.begin + i : upper + i);
  }
}

template <typename T>
__device__ __forceinline__ float biased(const Segment& w, uint32_t o, float value) {
  return w.bias == nullptr ? value : value + to_float(static_cast<const T*>(w.bias)[o]);
}

// From `gathered` on.
template <typename T, int kRows>
__device__ __forceinline__ void write_results(const Arguments& p, const Span& span, const float* gathered,
                                              const Share& share, void* y) {
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < share.count; i += kThreads) {
    const Result result = result_at<kRows>(p, span, share.begin + i);
    const Segment& w = p.segment[result.segment];
    if (result.o >= w.out || result.row >= uint32_t(p.rows)) continue;
    float value = biased<T>(w, result.o, gathered[i]);
    if (p.parts == 2) {
      value = activate(value, p.extras.activation) * biased<T>(p.segment[1], result.o, gathered[share.count + i]);
    }
    const uint64_t at = uint64_t(result.row) * p.y_width + w.y_begin + result.o;
    if (p.extras.residual != nullptr) value += to_float(static_cast<const T*>(p.extras.residual)[at]);
    if (p.extras.y_is_f32) {
      static_cast<float*>(y)[at] = value;
    } else {
      round_to(value, static_cast<T*>(y)[at]);
    }
  }
}

// Leaves the block's sums in global memory; true in the block of the stripe that comes last, which sees them all.
template <int kRows>
__device__ __forceinline__ bool arrives_last(const Arguments& p, const Span& span, const Shared& s, float* partials,
                                             uint32_t stride, uint32_t stripe, uint32_t slice) {
  for (uint32_t i = threadIdx.x; i < span.tiles * kTile * kRows; i += kThreads) {
    __stcg(partials + slice * stride + i, s.sums[i]);
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const bool last = atomicAdd(p.arrived + stripe, 1) == int(p.slices) - 1;
    if (last) p.arrived[stripe] = 0;
    s.largest[0] = last;
    __threadfence();
  }
  __syncthreads();
  return s.largest[0] != 0;
}

// The block's share of the results of its stripe: with clusters a slice of them.
template <int kRows>
__device__ __forceinline__ Share share_of(const Arguments& p, const Span& span) {
  const uint32_t results = span.count * kTile * kRows, slice = blockIdx.x & (p.slices - 1);
  if (!p.clusters) return {0, results};
  const uint32_t begin = results * slice >> p.slice_shift;
  return {begin, (results * (slice + 1) >> p.slice_shift) - begin};
}

// After the last step, which has ended with a barrier. `weight`: weight_of() the thread's first result.
template <typename T, int kRows>
__device__ __forceinline__ void join(const Arguments& p, const Span& span, const Shared& s, float weight, void* y) {
  const uint32_t slice = blockIdx.x & (p.slices - 1), stripe = blockIdx.x >> p.slice_shift;
  const uint32_t stride = p.tiles * kTile * kRows;
  const Share share = share_of<kRows>(p, span);
  if (p.clusters) {
    cluster_arrive();
    cluster_wait();
    gather<kRows>(p, span, {s.sums, nullptr, p.slices, 0}, share, weight, s.joined);
    __syncthreads();
    cluster_leave();
    write_results<T, kRows>(p, span, s.joined, share, y);
    cluster_wait();  // none leaves while others read its sums
    return;
  }
  float* const partials = p.partials + uint64_t(stripe) * p.slices * stride;
  if (p.slices > 1 && !arrives_last<kRows>(p, span, s, partials, stride, stripe, slice)) return;
  gather<kRows>(p, span, {s.sums, partials, p.slices, stride}, share, weight, s.sums);
  __syncthreads();
  write_results<T, kRows>(p, span, s.sums, share, y);
}

}  // namespace localq::vq
