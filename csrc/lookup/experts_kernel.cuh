// vq_experts: the kernel (experts.cu says what it does).
#pragma once

#include "lookup/experts.h"
#include "lookup/mainloop.cuh"
#include "lookup/slice_reduce.cuh"
#include "lookup/tables.cuh"

namespace localq::vq {

// What of a launch is not in its Arguments.
struct Chosen {
  const VqPlace* places;              // [experts][parts]
  const int32_t* chosen;              // [slots]
  const float* weights;               // [slots], of down
  uint32_t experts, stripes, slices;  // stripes and slices of one slot
};

constexpr uint32_t kOwnBytes = (sizeof(Arguments) + 255) / 256 * 256;

// The slot of the block: the slots' stripes lie behind each other, but of down their slices do.
template <bool kDown>
__device__ __forceinline__ uint32_t slot_of(const Chosen& c) {
  return kDown ? blockIdx.x / c.slices % (gridDim.x / (c.stripes * c.slices)) : blockIdx.x / (c.stripes * c.slices);
}

// One thread: the arguments of the block's own product.
template <bool kDown>
__device__ __forceinline__ void take_expert(const Arguments& given, const Chosen& c, uint32_t slot, Arguments& own) {
  own = given;
  const uint32_t expert = uint32_t(min(max(c.chosen[slot], 0), int32_t(c.experts) - 1));
  for (uint32_t part = 0; part < given.parts; ++part) {
    const VqPlace& place = c.places[expert * given.parts + part];
    Segment& segment = own.segment[part];
    for (uint32_t b = 0; b < given.books; ++b) {
      segment.codes[b] = place.codes[b], segment.fragments[b] = static_cast<const uint4*>(place.fragments[b]);
    }
    segment.scales = place.scales, segment.factor = place.factor;
  }
  if (kDown) {
    own.first_slice = slot * c.slices;
    own.segment[0].factor *= c.weights[slot];
  } else {
    own.first_stripe = slot * c.stripes;
    own.meeting += uint64_t(own.first_stripe) * c.slices * own.tiles * kTile;
  }
}

// Of down: sums are weighted before they meet those of other experts, whose scales are others. Then synchronise.
__device__ __forceinline__ void weigh(const Span& span, const Shared& s, const Arguments& p) {
  const Share all = {0, span.count * kTile};
  for (uint32_t i = threadIdx.x; i < all.count; i += kThreads) s.sums[i] *= weight_of<1>(p, span, all, i);
}

template <typename T, bool kDown, bool kRotated>
__global__ void __launch_bounds__(kThreads, 1)
    vq_experts_kernel(const __grid_constant__ Arguments given, const __grid_constant__ Chosen c, const T* x, T* y) {
  Arguments& p = *reinterpret_cast<Arguments*>(shared_memory());
  release_dependents();
  dependency_wait();  // the router's choice says where codes are
  const uint32_t slot = slot_of<kDown>(c);
  if (threadIdx.x == 0) take_expert<kDown>(given, c, slot, p);
  __syncthreads();
  const Shared s = carve<1>(shared_memory() + kOwnBytes, p);
  const Span span = span_of<1>(p);
  fill<1>(p, span, s);
  __syncthreads();
  const T* const own_x = kDown ? x + uint64_t(slot) * p.in : x;
  Minus minus = {};
  if constexpr (kRotated) minus = ask_signs(p, span);
  const Asked<T, kRotated> asked = ask<T, 1, kRotated>(p, span, own_x);
  Codes<1> codes;
  load_item<1>(codes, s, s.steps[0], warp_number());
  Codewords codewords = load_codewords<1>(s.steps[0]);
  stage<T, 1, kRotated>(p, span, s, own_x, asked, minus);
  __syncthreads();
  const Selectors<1> select;
  const bool two = p.tables > p.step_tables;
#pragma unroll 1
  for (uint32_t index = 0, number = 0;; ++index, number ^= two) {  // as vq_gemv_kernel
    const Step& next = s.steps[index];
    if (index > 0) {
      add_step<1>(s, number ^ two, s.steps[index - 1], next, select, codes);
      if (next.tiles == 0) break;
      codewords = load_codewords<1>(next);
      if (!two) __syncthreads();
    }
    build<1>(p, s, next, number, codewords);
    __syncthreads();
  }
  __syncthreads();
  if (kDown) {
    weigh(span, s, p);
    __syncthreads();
    if (threadIdx.x == 0) p.segment[0].scales = nullptr, p.segment[0].factor = 1.f;
    __syncthreads();
  }
  const float weight = weight_of<1>(p, span, share_of<1>(p, span), threadIdx.x);
  join<T, 1>(p, span, s, weight, kDown ? y : y + uint64_t(slot) * p.y_width);
}

}  // namespace localq::vq
