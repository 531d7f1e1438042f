// What a block of vptq_gemv.cu keeps in shared memory, and how x, scale and bias come there.
#pragma once

#include "gather/vptq_gemv_kernel.cuh"

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
    kept = shared_address(x + p.window * kRows);
  }
};

// Values of eight columns from one on. kLines: the array begins at a multiple of 16 bytes, and so do these.
template <bool kLines, typename V>
__device__ __forceinline__ Eight<V> read_eight(const V* from) {
  Eight<V> found;
  if constexpr (kLines) return *reinterpret_cast<const Eight<V>*>(from);
#pragma unroll
  for (int k = 0; k < 8; ++k) found.value[k] = from[k];
  return found;
}

// Where eight columns from `column` on lie. Arrays by column are read in whole lines and laid where their columns
// belong: to read them in the order of the places instead costs L1 a cycle for each value.
template <bool kLines>
__device__ __forceinline__ Eight<uint16_t> places_of(const VptqGemv& p, const Pass& pass, uint32_t column) {
  const uint16_t* const places = p.of[pass.segment].places;
  if (kLines || places != nullptr) return read_eight<kLines>(places + column);
  Eight<uint16_t> found;
#pragma unroll
  for (int k = 0; k < 8; ++k) found.value[k] = uint16_t(column + k);
  return found;
}

// Zeros at the places of a window behind the last column, of words of `each`.
template <typename V>
__device__ __forceinline__ void clear_rest(const VptqGemv& p, const Pass& pass, V* staged, uint32_t each) {
  const uint32_t there = min(p.in - pass.begin, p.window);
  for (uint32_t i = there * each + threadIdx.x; i < p.window * each; i += kRowThreads) staged[i] = V{};
}

// Scale and bias of a window by place. kLines as below; no branch stands between loads then, where ptxas would wait for
// them. All threads; then synchronise.
template <typename T, bool kLines, typename Pair>
__device__ __forceinline__ void lay_norm(const VptqGemv& p, const Pass& pass, Pair* norm) {
  constexpr int kCount = 4;  // loads of each that are in flight together
  const VptqSegment& of = p.of[pass.segment];
#pragma unroll 1
  for (uint32_t first = 8 * threadIdx.x; first < p.in; first += kCount * 8 * kRowThreads) {
    Eight<uint16_t> places[kCount];
    Eight<T> scale[kCount], bias[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const uint32_t column = min(first + k * 8 * kRowThreads, p.in - 8);
      places[k] = places_of<kLines>(p, pass, column);
      scale[k] = read_eight<kLines>(static_cast<const T*>(of.scale) + column);
      bias[k] = read_eight<kLines>(static_cast<const T*>(of.bias) + column);
    }
#pragma unroll
    for (int k = 0; k < 8 * kCount; ++k) {
      const uint32_t place = places[k / 8].value[k % 8] - pass.begin;
      if (first + k / 8 * 8 * kRowThreads < p.in && place < p.window) {
        norm[place] = Pair{scale[k / 8].value[k % 8], bias[k / 8].value[k % 8]};
      }
    }
  }
  clear_rest(p, pass, norm, 1);
}

// What all rows of x have in a column.
template <typename T, int kRows>
struct alignas(sizeof(T) * kRows) Rows {
  T value[kRows];
};

// The norm of eights of a row of x, 8 * kRowThreads columns apart.
template <NormKind kKind, typename T, int kCount>
__device__ __forceinline__ void norm_eights(Eight<T> (&values)[kCount][1], const VptqGemv& p, uint32_t first,
                                            float inverse_rms) {
#pragma unroll
  for (int k = 0; k < 8 * kCount; ++k) {
    const uint32_t column = min(first + k / 8 * 8 * kRowThreads, p.in - 8) + k % 8;
    T& value = values[k / 8][0].value[k % 8];
    value = normed(value, inverse_rms, p.extras.norm_weight, column, kKind);
  }
}

// x of a window by place, [window, kRows], with its norm; zeros in rows that are not there. All threads; then
// synchronise.
template <typename T, int kRows, bool kLines>
__device__ __forceinline__ void lay_x(const VptqGemv& p, const Pass& pass, T* staged, const T* x, float inverse_rms) {
  constexpr int kCount = kRows == 1 ? 4 : 1;
#pragma unroll 1
  for (uint32_t first = 8 * threadIdx.x; first < p.in; first += kCount * 8 * kRowThreads) {
    Eight<uint16_t> places[kCount];
    Eight<T> values[kCount][kRows];
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const uint32_t column = min(first + k * 8 * kRowThreads, p.in - 8);
      places[k] = places_of<kLines>(p, pass, column);
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const uint32_t there = kRows == 1 ? 0 : min(row, p.rows - 1);
        values[k][row] = read_eight<kLines>(x + uint64_t(there) * p.in + column);
      }
    }
    if constexpr (kRows == 1) {  // a norm needs one row
      if (p.extras.norm == NormKind::kPlain) norm_eights<NormKind::kPlain>(values, p, first, inverse_rms);
      if (p.extras.norm == NormKind::kOffset) norm_eights<NormKind::kOffset>(values, p, first, inverse_rms);
    }
#pragma unroll
    for (int k = 0; k < 8 * kCount; ++k) {
      const uint32_t place = places[k / 8].value[k % 8] - pass.begin;
      if (first + k / 8 * 8 * kRowThreads >= p.in || place >= p.window) continue;
      Rows<T, kRows> column;
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        column.value[row] = kRows == 1 || row < p.rows ? values[k / 8][row].value[k % 8] : T{};
      }
      reinterpret_cast<Rows<T, kRows>*>(staged)[place] = column;
    }
  }
  clear_rest(p, pass, staged, kRows);
}

// The same of a matrix whose arrays begin anywhere, and which may have no norm.
template <typename T, typename Pair>
__device__ __forceinline__ void stage_norm(const VptqGemv& p, const Pass& pass, Pair* norm) {
  const VptqSegment& of = p.of[pass.segment];
  if (of.scale == nullptr) return;
  if (of.lines) return lay_norm<T, true>(p, pass, norm);
  lay_norm<T, false>(p, pass, norm);
}

template <typename T, int kRows>
__device__ __forceinline__ void stage_columns(const VptqGemv& p, const Pass& pass, T* staged, const T* x,
                                              float inverse_rms) {
  if (p.of[pass.segment].lines) return lay_x<T, kRows, true>(p, pass, staged, x, inverse_rms);
  lay_x<T, kRows, false>(p, pass, staged, x, inverse_rms);
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
