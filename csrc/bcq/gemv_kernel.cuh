// bcq_gemv: the kernel (gemv.cu says what it does).
#pragma once

#include "bcq/bit_products.cuh"
#include "lookup/slice_reduce.cuh"

namespace localq::bcq {

// The warp's blocks of a chunk that begins at `first`.
__device__ __forceinline__ Range range_of(const Arguments& p, uint32_t first) {
  const uint32_t count = min(p.chunk, p.columns - first), part = vq::warp_number() & (p.split - 1);
  return {first + (count * part >> p.split_log), first + (count * (part + 1) >> p.split_log)};
}

// Are the batch's codes there? Zero, which ptxas does not know: what is added to it waits for them.
template <int kRows, Groups kGroups>
__device__ __forceinline__ uint32_t awaited(const Batch<kRows, kGroups>& batch, uint32_t zero) {
  uint32_t there = 0;
#pragma unroll
  for (int i = 0; i < units_of_batch<kRows, kGroups>(); ++i) there |= batch.codes[i].x | batch.scales[i];
  return there & zero;
}

// All units of the warp in a chunk, whose first batch is `even`. `x`, `share`: the lane's, of its first block and tile.
template <int kRows, Groups kGroups>
__device__ __forceinline__ void add_chunk(const Arguments& p, const vq::Span& span, const Shared& s, const Range& range,
                                          const uint8_t* x, float* share, Cursor& at, Batch<kRows, kGroups>& even) {
  const int sign = threadIdx.x % 4 == 3 ? -2 : 2;
  Work<kRows, kGroups> work = {};
  work.tile = vq::warp_number() >> p.split_log, work.block = range.begin;
  work.x = x, work.share = share;
#pragma unroll 1
  while (work.tile < span.tiles) {
    Batch<kRows, kGroups> odd = {};
    load_batch<kRows, kGroups>(odd, p, span, s, range, at, awaited(even, p.zero));
    add_batch<kRows, kGroups>(work, even, p, range, sign);
    load_batch<kRows, kGroups>(even, p, span, s, range, at, awaited(odd, p.zero));
    if (work.tile >= span.tiles) break;
    add_batch<kRows, kGroups>(work, odd, p, range, sign);
  }
}

// The zero points of all of the warp's tiles, likewise.
template <int kRows, Groups kGroups>
__device__ __forceinline__ void add_zero_points(const Arguments& p, const vq::Span& span, const Shared& s,
                                                const Range& range, const uint8_t* x, float* share) {
#pragma unroll 1
  for (uint32_t tile = vq::warp_number() >> p.split_log; tile < span.tiles; tile += kWarps >> p.split_log) {
    Sums<kRows> total = {};
    add_zeros<kRows, kGroups>(total, p, s, range, x, tile);
    leave_share<kRows>(total, share);
    share += kWarps * kTile * kRows;
  }
}

// Shares of each result, in their order.
template <int kRows>
__device__ __forceinline__ void add_shares(const Arguments& p, const vq::Span& span, const Shared& s) {
  constexpr uint32_t kEach = kTile * kRows;
  for (uint32_t i = threadIdx.x; i < span.tiles * kEach; i += kThreads) {
    const float* const of = s.shares + i / kEach * p.split * kEach + i % kEach;
    float sum = 0.f;
    for (uint32_t part = 0; part < p.split; ++part) sum += of[part * kEach];
    s.sums[i] = sum;
  }
}

template <typename T, int kRows, Groups kGroups>
__global__ void __launch_bounds__(kThreads, 1)
    bcq_gemv_kernel(const __grid_constant__ Arguments p, const T* x, void* y) {
  const Shared s = carve<kRows>(shared_memory(), p);
  const vq::Span span = vq::span_of<kRows>(p);
  fill<kRows>(p, span, s);
  __syncthreads();
  float inverse_rms = 0.f;
#pragma unroll 1
  for (uint32_t first = 0; first < p.columns; first += p.chunk) {
    const Range range = range_of(p, first);
    Cursor at = {vq::warp_number() >> p.split_log};
    enter_tile<kGroups>(p, span, s, range, at);
    Batch<kRows, kGroups> batch = {};
    load_batch<kRows, kGroups>(batch, p, span, s, range, at, 0);
    if (first == 0) {
      release_dependents();
      dependency_wait();
      if (p.extras.norm != NormKind::kNone) inverse_rms = vq::inverse_rms_of(p, s.scratch, vq::squares_of(p, x));
    } else {
      __syncthreads();  // x may still be read
    }
    stage<T, kRows>(p, s, x, inverse_rms, first, min(p.chunk, p.columns - first));
    __syncthreads();
    if (range.begin >= range.end) continue;
    const uint8_t* const mine = s.x + (range.begin - first) * (kRows * kXBytes);
    float* const share = s.shares + vq::warp_number() * (kTile * kRows);
    add_chunk<kRows, kGroups>(p, span, s, range, mine, share, at, batch);
    if (p.layers > p.planes) add_zero_points<kRows, kGroups>(p, span, s, range, mine, share);
  }
  __syncthreads();
  add_shares<kRows>(p, span, s);
  __syncthreads();
  vq::write_results<T, kRows>(p, span, s.sums, 1, {0, span.count * kTile * kRows}, y);
}

}  // namespace localq::bcq
