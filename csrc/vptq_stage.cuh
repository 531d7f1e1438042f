// What a block of vptq_gemv.cu keeps in shared memory, and how x, scale and bias come there by place.
#pragma once

#include "vptq_gemv.cuh"

namespace localq {

// The parts of a block's shared memory.
template <typename T, typename Warp, int kRows>
struct Memory {
  float *scratch, *sums, *shares;
  typename Warp::Pair* norm;  // scale and bias of a window
  T* x;                       // [window, kRows]
  uint32_t kept;              // address of the codebooks' first entries

  __device__ __forceinline__ Memory(const VptqGemv& p, uint8_t* memory) {
    scratch = reinterpret_cast<float*>(memory);
    sums = scratch + kRowWarps;
    shares = sums + (p.extras.activation != Activation::kNone ? 2 : 1) * p.block_units * Warp::kValues;
    norm = reinterpret_cast<typename Warp::Pair*>(shares + 2 * p.group * kRowWarps * Warp::kValues);
    x = reinterpret_cast<T*>(norm + p.window);
    kept = address_in_shared(x + p.window * kRows);
  }
};

// Scale and bias of a window by place; zeros behind the last column. All threads; then synchronise.
template <typename T, typename Pair>
__device__ __forceinline__ void stage_norm(const VptqGemv& p, const Pass& pass, Pair* norm) {
  const VptqSegment& from = p.of[pass.segment];
  if (from.scale == nullptr) return;
  for (uint32_t i = threadIdx.x; i < p.window; i += kRowThreads) {
    const uint32_t place = pass.begin + i;
    T scale, bias;
    round_to(0.f, scale), round_to(0.f, bias);
    if (place < p.in) {
      const uint32_t column = from.perm == nullptr ? place : min(uint32_t(from.perm[place]), p.in - 1);
      scale = static_cast<const T*>(from.scale)[column], bias = static_cast<const T*>(from.bias)[column];
    }
    norm[i] = Pair{scale, bias};
  }
}

// x of a window by place, [window, kRows], with its norm; zeros behind the last column and row. As above.
template <typename T, int kRows>
__device__ __forceinline__ void stage_places(const VptqGemv& p, const Pass& pass, T* staged, const T* x,
                                             float inverse_rms) {
  const uint16_t* const perm = p.of[pass.segment].perm;
  for (uint32_t i = threadIdx.x; i < p.window; i += kRowThreads) {
    const uint32_t place = pass.begin + i;
    const bool there = place < p.in;
    const uint32_t column = perm == nullptr || !there ? place : min(uint32_t(perm[place]), p.in - 1);
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      T value;
      round_to(0.f, value);
      if (there && row < p.rows) {
        value = x[uint64_t(row) * p.in + column];
        if (p.extras.norm != NormKind::kNone) {
          value = normed(value, inverse_rms, p.extras.norm_weight, column, p.extras.norm);
        }
      }
      staged[i * kRows + row] = value;
    }
  }
}

// 1 / rms of one row of x; 1 where no norm is asked for. All threads must call.
template <typename T>
__device__ __forceinline__ float inverse_rms_of(const VptqGemv& p, const T* x, float* scratch) {
  if (p.extras.norm == NormKind::kNone) return 1.f;
  float squares = 0.f;
  for (uint32_t i = threadIdx.x; i < p.in; i += kRowThreads) squares += to_float(x[i]) * to_float(x[i]);
  return rsqrtf(block_sum(squares, scratch) / p.in + p.extras.eps);
}

}  // namespace localq
