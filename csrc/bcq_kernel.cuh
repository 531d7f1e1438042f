// bcq_gemv: the kernel (bcq_gemv.cu says what it does).
#pragma once

#include "bcq_lookup.cuh"
#include "vq_join.cuh"

namespace localq::bcq {

// What fill() of vq_gemv leaves: where the scales of the block's tiles begin, behind where their codes do, and sums of
// further layers. All threads; then synchronise.
template <int kRows>
__device__ __forceinline__ void fill_scales(const Arguments& p, const Span& span, const Shared& s) {
  for (uint32_t tile = threadIdx.x; tile < span.tiles; tile += kThreads) {
    const Place place = place_of(p, span, tile);
    s.codes[p.tiles + tile] = static_cast<const uint8_t*>(p.segment[place.segment].group_scales) +
                              uint64_t(place.tile) * (p.layers * p.groups * kTile * 2);
  }
  const uint32_t each = p.tiles * kTile * kRows;
  for (uint32_t i = each + threadIdx.x; i < p.copies * each; i += kThreads) s.sums[i] = 0.f;
}

// Sums of x over four positions each, for the zero points: f32 [four positions of the slice][kRows] behind all sums of
// results, as large as the table's entries.
template <int kRows>
__device__ __forceinline__ void sum_x(const Arguments& p, const Shared& s) {
  float* const to = s.sums + p.copies * p.tiles * kTile * kRows;
  for (uint32_t i = threadIdx.x; i < p.x_stride / 32 * kRows; i += kThreads) {
    const auto* const from = reinterpret_cast<const Eight<__half>*>(s.x + i % kRows * p.x_stride + i / kRows * 32);
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const Eight<__half> eight = from[k];
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += __half2float(eight.value[j]);
    }
    to[i] = sum / kFactor;
  }
}

// Sums of all layers to those of the first, in their order.
template <int kRows>
__device__ __forceinline__ void add_copies(const Arguments& p, const Shared& s) {
  const uint32_t each = p.tiles * kTile * kRows;
  for (uint32_t i = threadIdx.x; i < each; i += kThreads) {
    float sum = s.sums[i];
    for (uint32_t k = 1; k < p.copies; ++k) sum += s.sums[k * each + i];
    s.sums[i] = sum;
  }
}

template <typename T, int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    bcq_gemv_kernel(const __grid_constant__ Arguments p, const T* x, void* y) {
  const Shared s = carve<kRows>(shared_memory(), p);
  const Span span = span_of<kRows>(p);
  fill<kRows>(p, span, s);
  fill_scales<kRows>(p, span, s);
  __syncthreads();
  Work<kRows> work;
  load_work<kRows>(work, p, s, s.steps[0], settled(p, items_of<kRows>(s.steps[0]), {warp_number(), 0}));
  Codewords codewords = load_codewords<kRows>(s.steps[0]);
  release_dependents();
  dependency_wait();
  stage<T, kRows>(p, span, s, x, InBlocks{p, span.column});
  __syncthreads();
  if (p.layers > p.planes) sum_x<kRows>(p, s);
  const Selectors<kRows> select;
  const bool two = p.tables == 2;
#pragma unroll 1
  for (uint32_t index = 0, number = 0;; ++index, number ^= two) {  // makes table `index`, looks up in the one before
    const Step& next = s.steps[index];
    if (index > 0) {
      add_layers<kRows>(p, s, number ^ two, s.steps[index - 1], next, select, work);
      if (next.tiles == 0) break;
      codewords = load_codewords<kRows>(next);
      if (!two) __syncthreads();
    }
    build<kRows>(p, s, next, number, codewords);
    __syncthreads();
  }
  __syncthreads();
  if (p.copies > 1) {
    add_copies<kRows>(p, s);
    __syncthreads();
  }
  join<T, kRows>(p, span, s, kFactor, y);
}

}  // namespace localq::bcq
