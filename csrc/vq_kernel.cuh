// vq_gemv: the kernel (vq_gemv.cu says what it does).
#pragma once

#include "vq_join.cuh"
#include "vq_lookup.cuh"
#include "vq_tables.cuh"

namespace localq::vq {

template <typename T, int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    vq_gemv_kernel(const __grid_constant__ Arguments p, const T* x, void* y) {
  const Shared s = carve<kRows>(shared_memory(), p);
  const Span span = span_of<kRows>(p);
  Step step = step_at<kRows>(p, span, 0);
  for (uint32_t i = threadIdx.x; i < halves<kRows>() * p.tiles * kTile * kRows; i += kThreads) s.sums[i] = 0.f;
  if (threadIdx.x < kRows) s.largest[threadIdx.x] = 0;
  fill_codes(p, span, s);
  __syncthreads();
  Ring<kRows> ring;
  fill<kRows>(ring, p, s, step);
  release_dependents();
  dependency_wait();
  stage<T, kRows>(p, span, s, x);
  __syncthreads();
  build<kRows>(p, span, s, step, 0);
  __syncthreads();
  const bool two = p.tables == 2, early = two && warp_number() % 2 == 0;
#pragma unroll 1
  for (uint32_t index = 0; index < span.steps; ++index) {
    const Step next = step_at<kRows>(p, span, index + 1);
    const uint32_t number = two ? index % 2 : 0, other = two ? 1 - number : 0;
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
      if (early != (turn == 0)) {
        add_step<kRows>(p, s, number, step, next, ring);
      } else if (next.tiles != 0) {
        build<kRows>(p, span, s, next, other);
      }
      if (!two) __syncthreads();
    }
    if (two) __syncthreads();
    step = next;
  }
  join<T, kRows>(p, span, s, y);
}

}  // namespace localq::vq
