// vq_gemv: the kernel (gemv.cu says what it does).
#pragma once

#include "lookup/mainloop.cuh"
#include "lookup/slice_reduce.cuh"
#include "lookup/tables.cuh"

namespace localq::vq {

// From before the launches that this one depends on have ended to where its slice of x lies in shared memory, rotated
// or as it is: asks for x, and behind it for the first codes. Then synchronise.
template <typename T, int kRows, bool kRotated>
__device__ __forceinline__ void take_x(const Arguments& p, const Span& span, const Shared& s, const T* x,
                                       Codes<kRows>& codes) {
  Minus minus = {};
  if constexpr (kRotated) minus = ask_signs(p, span);
  release_dependents();
  dependency_wait();
  const Asked<T, kRotated> asked = ask<T, kRows, kRotated>(p, span, x);
  load_item<kRows>(codes, s, s.steps[0], warp_number());
  stage<T, kRows, kRotated>(p, span, s, x, asked, minus);
}

// One kernel for x of both kinds: a step has launches of both by turns, and the instructions of two kernels would drive
// each other out of the cache. What rotates stands apart, so that the way without it is what it is by itself.
template <typename T, int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    vq_gemv_kernel(const __grid_constant__ Arguments p, const T* x, void* y) {
  const Shared s = carve<kRows>(shared_memory(), p);
  const Span span = span_of<kRows>(p);
  fill<kRows>(p, span, s);
  __syncthreads();
  Codewords codewords = load_codewords<kRows>(s.steps[0]);
  Codes<kRows> codes;
  if (kRows > 1 || p.rotation.signs == nullptr) {
    take_x<T, kRows, false>(p, span, s, x, codes);
  } else {
    take_x<T, kRows, kRows == 1>(p, span, s, x, codes);
  }
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
