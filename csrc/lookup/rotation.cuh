// vq_gemv: the slice of one row of x rotated, in place of a launch of `hadamard` before this one: x has the same bits.
// (The power of two by which tables are scaled is of the columns that the slice reads; without a rotation those that it
// stages have a say. It tells apart table entries 2^-29 below the largest alone.)
//
// A block of threads turns every Hadamard block that its slice touches, or that codewords which begin in it reach,
// whole (hadamard.cuh). A thread has 8 columns, so that a piece of 4096 columns, the largest Hadamard block, is turned
// at once. Columns that meet other warps' lie where tables are made later.
#pragma once

#include "lookup/gemv.cuh"
#include "lookup/hadamard.cuh"

namespace localq::vq {

constexpr uint32_t kPiece = kThreads * kLaneColumns;
constexpr uint32_t kPiecesAhead = 2;  // asked for before codes
constexpr uint32_t kPiecesHeld = kTableBytes / (kPiece * uint32_t(sizeof(float)));
static_assert(kPiece == kLargestBlock);

// The columns that a block needs, and those that it turns: from `origin`, where a Hadamard block begins, on. `end` and
// `turned_end` are not behind the matrix.
struct Turned {
  uint32_t origin, end, turned_end;
};

__device__ __forceinline__ Turned turned_of(const Arguments& p, const Span& span) {
  const uint32_t inside = p.rotation.block - 1, end = min(span.columns_end + p.rotation.reach, p.in);
  return {span.column & ~inside, end, (end + inside) & ~inside};
}

// Where the lane's columns of piece `piece` begin.
__device__ __forceinline__ uint32_t column_of(const Turned& turned, uint32_t piece) {
  return turned.origin + kPiece * piece + kLaneColumns * threadIdx.x;
}

// The signs of the lane's columns of the pieces that are asked for ahead, which do not depend on x.
struct Minus {
  uint32_t of[kPiecesAhead];
};

__device__ __forceinline__ Minus ask_signs(const Arguments& p, const Span& span) {
  Minus minus = {};
  const Turned turned = turned_of(p, span);
#pragma unroll
  for (uint32_t piece = 0; piece < kPiecesAhead; ++piece) {
    const uint32_t column = column_of(turned, piece);
    if (column < turned.turned_end) minus.of[piece] = __ldg(p.rotation.signs + column / kLaneColumns);
  }
  return minus;
}

template <typename T>
struct alignas(4) Two {
  T value[2];
};

// Largest magnitude of what a thread has written, as bits.
template <typename T>
__device__ __forceinline__ uint32_t magnitude(const T& value) {
  return reinterpret_cast<const uint16_t&>(value) & 0x7fffu;
}

// The lane's columns of a warp whose first is `begin`, which no other warp's meet.
template <typename T>
__device__ __forceinline__ void put_alone(const float (&v)[kLaneColumns], float scale, uint32_t begin, const Span& span,
                                          uint32_t end, T* to, uint32_t& largest) {
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t column = begin + place_in_warp(half);
    if (column < span.column || column >= end) continue;
    const Four<T> four = rounded_half<T>(v, half, scale);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) largest = max(largest, magnitude(four.value[i]));
    *reinterpret_cast<Four<T>*>(to + (column - span.column)) = four;
  }
}

// Columns `begin` .. `end` - 1 of the result, of pieces from column `first` on that lie in `columns`: two a thread.
template <typename T, uint32_t kWarps>
__device__ __forceinline__ void put_across(const float* columns, float scale, uint32_t first, uint32_t begin,
                                           uint32_t end, T* to, uint32_t& largest) {
#pragma unroll 1
  for (uint32_t i = 2 * threadIdx.x; begin + i < end; i += 2 * kThreads) {
    const uint32_t at = begin + i - first, row = at / kWarpColumns % kWarps;
    const float2 sum = sum_across<kWarps>(columns + (at - row * kWarpColumns), row);
    Two<T> two;
    round_to(__fmul_rn(sum.x, scale), two.value[0]);
    round_to(__fmul_rn(sum.y, scale), two.value[1]);
    largest = max(largest, max(magnitude(two.value[0]), magnitude(two.value[1])));
    *reinterpret_cast<Two<T>*>(to + i) = two;
  }
}

template <typename T>
__device__ __forceinline__ void put_across(const float* columns, const Rotation& r, uint32_t first, uint32_t begin,
                                           uint32_t end, T* to, uint32_t& largest) {
  static_assert(kWarpsOfBlock == 16);
  if (r.block == 2 * kWarpColumns) return put_across<T, 2>(columns, r.scale, first, begin, end, to, largest);
  if (r.block == 4 * kWarpColumns) return put_across<T, 4>(columns, r.scale, first, begin, end, to, largest);
  if (r.block == 8 * kWarpColumns) return put_across<T, 8>(columns, r.scale, first, begin, end, to, largest);
  put_across<T, 16>(columns, r.scale, first, begin, end, to, largest);
}

// A piece of H (signs * x) that begins at `begin`, so far as it is within warps: to `held` where warps meet, else to
// `to`. `eight` are the lane's columns.
template <typename T>
__device__ __forceinline__ void turn_piece(const Rotation& r, const Turned& turned, uint32_t begin, const Span& span,
                                           const Eight<T>& eight, uint32_t minus, float* held, T* to,
                                           uint32_t& largest) {
  const uint32_t of_warp = threadIdx.x / 32 * kWarpColumns;
  float v[kLaneColumns];
  take_signs(v, eight, minus);
  turn_in_warp(v, r.block);
  if (r.block <= kWarpColumns) return put_alone(v, r.scale, begin + of_warp, span, turned.end, to, largest);
  put_half(held + of_warp, v, 0);
  put_half(held + of_warp, v, 1);
}

// The slice of H (signs * x) to `to` [p.x_stride], zeros behind what is needed; `eight(piece, column)` are the lane's
// columns of x, normed where x is. Returns the largest magnitude that the thread has written, as bits. All threads.
template <typename T, typename Columns>
__device__ __forceinline__ uint32_t lay_rotated(const Arguments& p, const Span& span, const Shared& s,
                                                const Minus& minus, T* to, const Columns& eight) {
  const Rotation& r = p.rotation;
  const Turned turned = turned_of(p, span);
  auto* const columns = reinterpret_cast<float*>(s.tables);
  uint32_t largest = 0;
  for (uint32_t i = turned.end - span.column + threadIdx.x; i < p.x_stride; i += kThreads) round_to(0.f, to[i]);
#pragma unroll 1
  for (uint32_t begin = turned.origin, piece = 0; begin < turned.end; begin += kPiece, ++piece) {
    const uint32_t number = piece % kPiecesHeld, column = column_of(turned, piece);
    if (begin + threadIdx.x / 32 * kWarpColumns < turned.turned_end) {
      uint32_t signs = piece == 0 ? minus.of[0] : minus.of[1];
      if (piece >= kPiecesAhead && column < p.in) signs = __ldg(r.signs + column / kLaneColumns);
      turn_piece(r, turned, begin, span, eight(piece, column), signs, columns + number * kPiece, to, largest);
    }
    const uint32_t behind = begin + kPiece;
    if (r.block <= kWarpColumns || (behind < turned.end && number + 1 < kPiecesHeld)) continue;
    __syncthreads();
    const uint32_t first = begin - number * kPiece, from = max(first, span.column);
    put_across(columns, r, first, from, min(behind, turned.end), to + (from - span.column), largest);
    if (behind < turned.end) __syncthreads();  // `columns` are used anew
  }
  return largest;
}

}  // namespace localq::vq
