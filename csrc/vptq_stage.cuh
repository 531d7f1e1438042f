// What a block of vptq_gemv.cu keeps in shared memory, and how x, scale and bias come there by place.
//
// y = sum of w * scale * x over the columns + sum of bias * x: the first factor of a column is staged, and of the last
// sum each thread has the part of the columns that it stages. Where the latter is not finite, the row of x is
// multiplied as the definition has it, weight by weight (vptq_not_finite.cuh).
#pragma once

#include "vptq_gemv.cuh"

namespace localq {

// The parts of a block's shared memory.
template <typename T, typename Warp, int kRows>
struct Memory {
  float *scratch, *parts, *sums, *shares;  // parts: [kRows, kRowWarps], warps' sums of bias * x
  Staged<T, kRows> staged;
  uint32_t kept;  // address of what is kept of the codebooks, residuals first
  T* room;        // p.room bytes at its end or behind

  static __host__ __device__ constexpr uint32_t first_floats() {
    return kRowWarps + kRows * kRowWarps;
  }
  __device__ __forceinline__ Memory(const VptqGemv& p, uint8_t* memory)
      : scratch(reinterpret_cast<float*>(memory)),
        parts(scratch + kRowWarps),
        sums(scratch + first_floats()),
        shares(sums + (p.extras.activation != Activation::kNone ? 2 : 1) * p.block_units * Warp::kValues),
        staged(shares + 2 * p.group * kRowWarps * Warp::kValues, p.window) {
    uint8_t* const behind = reinterpret_cast<uint8_t*>(staged.x) + p.window * Staged<T, kRows>::kColumnBytes;
    kept = address_in_shared(behind);
    room = reinterpret_cast<T*>(behind + p.res_kept + p.kept - p.late);
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
};

// 1 / rms of a row of x, and its norm; `weight` null: no norm.
struct RowNorm {
  float inverse_rms;
  const void* weight;
  NormKind kind;

  template <typename T>
  __device__ __forceinline__ T operator()(T value, uint32_t column) const {
    return weight == nullptr ? value : normed(value, inverse_rms, weight, column, kind);
  }
};

// Columns first .. first + count - 1 `from`, normed, to `room`. All threads; then synchronise.
template <typename T>
__device__ __forceinline__ void copy_columns(T* room, const T* from, uint32_t first, uint32_t count,
                                             const RowNorm& norm) {
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < count / 8; i += kRowThreads) {
    Eight<T> eight = reinterpret_cast<const Eight<T>*>(from + first)[i];
#pragma unroll
    for (int k = 0; k < 8; ++k) eight.value[k] = norm(eight.value[k], first + 8 * i + k);
    reinterpret_cast<Eight<T>*>(room)[i] = eight;
  }
}

// use(i, value): values [in] `from`, normed, of every place i of the window, each by the thread that i % kRowThreads
// is; zeros behind the last column. Where there is room they come by way of it, so that L2 is asked for whole lines
// instead of a sector for each value: as many columns at a time as it has room for. All threads.
template <typename T, typename Use>
__device__ __forceinline__ void spread(const VptqGemv& p, const Pass& pass, T* room, const T* from, const RowNorm& norm,
                                       Use use) {
  constexpr int kCount = 8;
  const bool copied = p.room != 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0;
  const uint32_t piece = copied ? p.room / sizeof(T) : p.in;
#pragma unroll 1
  for (uint32_t begin = 0; begin < p.in; begin += piece) {
    if (copied) {
      __syncthreads();  // what was there before has been read
      copy_columns(room, from, begin, min(piece, p.in - begin), norm);
      __syncthreads();
    }
#pragma unroll 1
    for (uint32_t first = threadIdx.x; first < p.window; first += kCount * kRowThreads) {
      const Places<kCount> places(p, pass, first);
      T values[kCount];
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        round_to(0.f, values[k]);
        const uint32_t at = places.column[k] - begin;
        if (at < piece && places.column[k] < p.in) values[k] = copied ? room[at] : norm(from[at], at);
      }
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const uint32_t i = first + k * kRowThreads, column = places.column[k];
        const bool mine = column == Places<kCount>::kNoColumn ? begin == 0 : column - begin < piece;
        if (i < p.window && mine) use(i, values[k]);
      }
    }
  }
}

// Scale and bias of a window by place; of a matrix without them ones and zeros. All threads.
template <typename T, typename Staged>
__device__ __forceinline__ void stage_norm(const VptqGemv& p, const Pass& pass, const Staged& staged, T* room) {
  const VptqSegment& of = p.of[pass.segment];
  if (of.scale == nullptr) {
    for (uint32_t i = threadIdx.x; i < p.window; i += kRowThreads) {
      round_to(1.f, staged.scale_of(i));
      round_to(0.f, staged.bias_of(i));
    }
    return;
  }
  spread(p, pass, room, static_cast<const T*>(of.scale), RowNorm{},
         [&](uint32_t i, T value) { staged.scale_of(i) = value; });
  spread(p, pass, room, static_cast<const T*>(of.bias), RowNorm{},
         [&](uint32_t i, T value) { staged.bias_of(i) = value; });
}

// x of a window by place, behind its scale and bias; rows that are not there are zeros. Of each row the warp's part of
// the sum of bias * x is left in `parts`: NaN where a product with x is not finite, and zero stands for that x. All
// threads; then synchronise.
template <typename T, int kRows, typename Staged>
__device__ __forceinline__ void stage_places(const VptqGemv& p, const Pass& pass, const Staged& staged, T* room,
                                             float* parts, const T* x, const RowNorm& norm) {
#pragma unroll 1
  for (int row = 0; row < kRows; ++row) {
    float part = 0.f;
    const auto lay = [&](uint32_t i, T value) {
      const float scaled = to_float(staged.scale_of(i)) * to_float(value);
      const float added = to_float(staged.bias_of(i)) * to_float(value);
      const bool finite = fabsf(scaled) + fabsf(added) <= 3.4028235e38f;
      T zero;
      round_to(0.f, zero);
      staged.lay(i, row, finite ? value : zero, finite ? scaled : 0.f);
      part += finite ? added : __int_as_float(0x7fffffff);
    };
    if (row < p.rows) {
      spread(p, pass, room, x + uint64_t(row) * p.in, norm, lay);
    } else {
      T zero;
      round_to(0.f, zero);
      for (uint32_t i = threadIdx.x; i < p.window; i += kRowThreads) staged.lay(i, row, zero, 0.f);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) part += __shfl_xor_sync(~0u, part, step);
    if (threadIdx.x % 32 == 0) parts[row * kRowWarps + threadIdx.x / 32] = part;
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
