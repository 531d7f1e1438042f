// What vptq_gemv.cu does with x that is not finite: no factor of it stands for a column then, for inf * (w * scale +
// bias) is not inf * w * scale + inf * bias. Slow: the product of a result's weights one by one, where it is needed at
// all.
#pragma once

#include "rounding.cuh"
#include "vptq_gemv.cuh"

namespace localq {

// Result `r` of vector `vector` of the pass' matrix at place `place`, before its norm.
template <typename T>
__device__ __forceinline__ float codeword_at(const VptqGemv& p, const VptqSegment& of, uint64_t vector, uint32_t place,
                                             uint32_t length, uint32_t r) {
  uint32_t main, residual = 0;
  if (p.words == 0) {
    main = reinterpret_cast<const uint16_t*>(of.indices)[vector * p.in + place];
    if (p.residuals != 0) residual = of.res_indices[vector * p.in + place];
  } else {
    const uint32_t* const row = reinterpret_cast<const uint32_t*>(of.indices) + vector * p.words;
    const uint32_t both = packed_index(row, place, p.bits);
    main = both & ((1u << p.main_bits) - 1), residual = both >> p.main_bits;
  }
  const float w = to_float(reinterpret_cast<const T*>(of.centroids)[min(main, p.count - 1) * length + r]);
  if (p.residuals == 0) return w;
  const T more = reinterpret_cast<const T*>(of.res_centroids)[min(residual, p.residuals - 1) * length + r];
  return rounded<T>(w + to_float(more));
}

// The sum over a window's columns of bias * x where products with x are finite, of weight * x where they are not.
// x: the row; value(column): of it, normed.
template <typename T, typename Value>
__device__ __forceinline__ float sum_not_finite(const VptqGemv& p, const Pass& pass, uint64_t vector, uint32_t length,
                                                uint32_t r, Value value) {
  const VptqSegment& of = p.of[pass.segment];
  float sum = 0.f;
#pragma unroll 1
  for (uint32_t place = pass.begin; place < min(pass.begin + p.window, p.in); ++place) {
    const uint32_t column = of.perm == nullptr ? place : min(uint32_t(of.perm[place]), p.in - 1);
    const float x = value(column);
    const float scale = of.scale == nullptr ? 1.f : to_float(static_cast<const T*>(of.scale)[column]);
    const float bias = of.scale == nullptr ? 0.f : to_float(static_cast<const T*>(of.bias)[column]);
    if (fabsf(scale * x) + fabsf(bias * x) <= 3.4028235e38f) {
      sum += bias * x;
    } else if (x != x) {
      return x;
    } else {
      sum += x * __fadd_rn(__fmul_rn(codeword_at<T>(p, of, vector, place, length, r), scale), bias);
    }
  }
  return sum;
}

}  // namespace localq
