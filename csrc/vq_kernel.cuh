// vq_gemv: the kernel (vq_gemv.cu says what it does).
#pragma once

#include "vq_join.cuh"
#include "vq_step.cuh"
#include "vq_tables.cuh"

namespace localq::vq {

template <typename T, int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    vq_gemv_kernel(const __grid_constant__ Arguments p, const T* x, void* y) {
  const Shared s = carve<kRows>(shared_memory(), p);
  const Span span = span_of<kRows>(p);
  fill<kRows>(p, span, s);
  __syncthreads();
  Codewords codewords = load_codewords<kRows>(s.steps[0]);
  release_dependents();
  dependency_wait();
  const Asked<T> asked = ask<T, kRows>(p, span, x);
  Codes<kRows> codes;
  load_item<kRows>(codes, s, s.steps[0], warp_number());
  stage<T, kRows>(p, span, s, x, asked);
  __syncthreads();
  const Selectors<kRows> select;
  const bool two = p.tables > p.step_tables;
  float weight = 0.f;
#pragma unroll 1
  for (uint32_t index = 0, number = 0;; ++index, number ^= two) {  // makes table `index`, looks up in the one before
    const Step& next = s.steps[index];
    if (index > 0) {
      if (next.tiles == 0) weight = weight_of<kRows>(p, span, share_of<kRows>(p, span), threadIdx.x);
      add_step<kRows>(s, number ^ two, s.steps[index - 1], next, select, codes);
      if (next.tiles == 0) break;
      codewords = load_codewords<kRows>(next);
      if (!two) __syncthreads();
    }
    build<kRows>(p, s, next, number, codewords);
    __syncthreads();
  }
  __syncthreads();
  join<T, kRows>(p, span, s, weight, y);
}

}  // namespace localq::vq
