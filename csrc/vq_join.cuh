// vq_gemv: from the sums of a block to results: the slices of a stripe are added in their order, then comes what the
// extras ask for.
//
// With clusters the blocks of a stripe are one: each has a share of the results, and reads the sums of all through
// distributed shared memory. Elsewhere they meet in global memory, and the last to arrive adds up. Either way one order
// of additions, whoever comes when.
#pragma once

#include "vq_gemv.cuh"
#include "vq_machine.cuh"

namespace localq::vq {

// The block's sums, halves of tables added and brought back to the size of x, into the first half. All threads.
template <int kRows>
__device__ __forceinline__ void finish_sums(const Arguments& p, const Span& span, const Shared& s) {
  for (uint32_t i = threadIdx.x; i < span.tiles * kTile * kRows; i += kThreads) {
    float sum = s.sums[i];
    if (kRows == 1) sum += s.sums[p.tiles * kTile + i];
    s.sums[i] = sum * s.back[i % kRows];
  }
}

// Sum i of a stripe.
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

template <typename T>
__device__ __forceinline__ float weighted(const Arguments& p, const Segment& w, uint32_t o, float sum) {
  const float scale = p.scales_bf16 ? to_float(static_cast<const __nv_bfloat16*>(w.scales)[o])
                                    : to_float(static_cast<const __half*>(w.scales)[o]);
  const float value = sum * scale * w.factor;
  return w.bias == nullptr ? value : value + to_float(static_cast<const T*>(w.bias)[o]);
}

// Results begin .. end - 1 of the stripe, [unit][16][row of x].
template <typename T, int kRows>
__device__ __forceinline__ void write_results(const Arguments& p, const Span& span, const Slices& slices,
                                              uint32_t begin, uint32_t end, void* y) {
#pragma unroll 1
  for (uint32_t i = begin + threadIdx.x; i < end; i += kThreads) {
    const uint32_t row = i % kRows;
    const Place place = place_of(p, span, i / (kTile * kRows));
    const Segment& w = p.segment[place.segment];
    const uint32_t o = place.tile * kTile + i / kRows % kTile;
    if (o >= w.out || row >= uint32_t(p.rows)) continue;
    float value = weighted<T>(p, w, o, slices.at(i));
    if (p.parts == 2) {
      value = activate(value, p.extras.activation);
      value *= weighted<T>(p, p.segment[1], o, slices.at(span.count * kTile * kRows + i));
    }
    const uint64_t at = uint64_t(row) * p.y_width + w.y_begin + o;
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

// After the last step, which has ended with a barrier.
template <typename T, int kRows>
__device__ __forceinline__ void join(const Arguments& p, const Span& span, const Shared& s, void* y) {
  const uint32_t slice = blockIdx.x % p.slices, stripe = blockIdx.x / p.slices;
  const uint32_t results = span.count * kTile * kRows, stride = p.tiles * kTile * kRows;
  finish_sums<kRows>(p, span, s);
  __syncthreads();
  if (p.clusters) {
    const uint32_t begin = results * slice / p.slices, end = results * (slice + 1) / p.slices;
    cluster_meet();
    write_results<T, kRows>(p, span, {s.sums, nullptr, p.slices, 0}, begin, end, y);
    cluster_meet();  // none leaves while others read its sums
    return;
  }
  float* const partials = p.partials + uint64_t(stripe) * p.slices * stride;
  if (p.slices > 1 && !arrives_last<kRows>(p, span, s, partials, stride, stripe, slice)) return;
  write_results<T, kRows>(p, span, {s.sums, partials, p.slices, stride}, 0, results, y);
}

}  // namespace localq::vq
