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

// The columns of kCount places, kRowThreads apart from `first` on: in flight together, and so is what is read there. A
// loop that goes from place to place would wait for memory twice at each of them.
template <int kCount>
struct Places {
  uint32_t column[kCount];

  __device__ __forceinline__ Places(const VptqGemv& p, const Pass& pass, uint32_t first) {
    const uint16_t* const perm = p.of[pass.segment].perm;
    uint16_t found[kCount];
    if (perm != nullptr) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) found[k] = perm[min(pass.begin + first + k * kRowThreads, p.in - 1)];
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const uint32_t i = first + k * kRowThreads, place = pass.begin + i;
      column[k] = perm == nullptr ? place : min(uint32_t(found[k]), p.in - 1);
      if (i >= p.window || place >= p.in) column[k] = kNoColumn;
    }
  }

  static constexpr uint32_t kNoColumn = ~0u;

  // Values of a row of x, or of a norm; zeros where there is no column.
  template <typename T>
  __device__ __forceinline__ void read(T (&values)[kCount], const T* from) const {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      round_to(0.f, values[k]);
      if (column[k] != kNoColumn) values[k] = from[column[k]];
    }
  }

  template <typename T>
  __device__ __forceinline__ void norm(T (&values)[kCount], const VptqGemv& p, float inverse_rms) const {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const uint32_t at = min(column[k], p.in - 1);
      values[k] = normed(values[k], inverse_rms, p.extras.norm_weight, at, p.extras.norm);
      if (column[k] == kNoColumn) round_to(0.f, values[k]);
    }
  }
};

// The first p.in values `from`, in their order. All threads; then synchronise.
template <typename T>
__device__ __forceinline__ void copy_row(const VptqGemv& p, T* to, const T* from) {
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < p.in / 8; i += kRowThreads) {
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  }
}

// Scale and bias of a window by place; zeros behind the last column. Where a window is a whole row they come by way of
// the place of x, `room`, so that L2 is asked for whole lines instead of a sector for each value. All threads; then
// synchronise.
template <typename T, typename Pair>
__device__ __forceinline__ void stage_norm(const VptqGemv& p, const Pass& pass, Pair* norm, T* room) {
  constexpr int kCount = 8;
  const VptqSegment& of = p.of[pass.segment];
  if (of.scale == nullptr) return;
  const bool aligned = (reinterpret_cast<uintptr_t>(of.scale) | reinterpret_cast<uintptr_t>(of.bias)) % 16 == 0;
  const bool copied = aligned && p.window >= p.in;
#pragma unroll 1
  for (int part = 0; part < 2; ++part) {
    const T* from = static_cast<const T*>(part == 0 ? of.scale : of.bias);
    if (copied) {
      __syncthreads();  // what was copied before has been read
      copy_row(p, room, from);
      __syncthreads();
      from = room;
    }
#pragma unroll 1
    for (uint32_t first = threadIdx.x; first < p.window; first += kCount * kRowThreads) {
      T values[kCount];
      Places<kCount>(p, pass, first).read(values, from);
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const uint32_t i = first + k * kRowThreads;
        if (i < p.window) reinterpret_cast<T*>(norm + i)[part] = values[k];
      }
    }
  }
}

// x of a window by place, [window, kRows], with its norm; zeros behind the last column and row. As above.
template <typename T, int kRows>
__device__ __forceinline__ void stage_places(const VptqGemv& p, const Pass& pass, T* staged, const T* x,
                                             float inverse_rms) {
  constexpr int kCount = 8;
#pragma unroll 1
  for (uint32_t first = threadIdx.x; first < p.window; first += kCount * kRowThreads) {
    const Places<kCount> places(p, pass, first);
#pragma unroll 1
    for (int row = 0; row < kRows; ++row) {
      T values[kCount];
#pragma unroll
      for (int k = 0; k < kCount; ++k) round_to(0.f, values[k]);
      if (row < p.rows) places.read(values, x + uint64_t(row) * p.in);
      if (p.extras.norm != NormKind::kNone) places.norm(values, p, inverse_rms);
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const uint32_t i = first + k * kRowThreads;
        if (i < p.window) staged[i * kRows + row] = values[k];
      }
    }
  }
}

// 1 / rms of one row of x; 1 where no norm is asked for. All threads must call.
template <typename T>
__device__ __forceinline__ float inverse_rms_of(const VptqGemv& p, const T* x, float* scratch) {
  if (p.extras.norm == NormKind::kNone) return 1.f;
  float squares = 0.f;
  for (uint32_t i = threadIdx.x; i < p.in / 8; i += kRowThreads) {
    const Eight<T> eight = reinterpret_cast<const Eight<T>*>(x)[i];
#pragma unroll
    for (int k = 0; k < 8; ++k) squares += to_float(eight.value[k]) * to_float(eight.value[k]);
  }
  return rsqrtf(block_sum(squares, scratch) / p.in + p.extras.eps);
}

}  // namespace localq
