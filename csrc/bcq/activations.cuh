// bcq_gemv: x in bits.
//
// A block of 128 columns of a row of x is fixed point: 16 bits of two's complement times a power of two of its own, so
// that its largest value lies between 2^14 and 2^15. In shared memory it is 16 planes of 128 bits, operands B of
// m16n8k128 for planes 0 .. 7 and for planes 8 .. 15: word t of a plane has the signs of columns 32 t .. 32 t + 31. The
// lanes (g, t) of a product are left with planes 2 t and 2 t + 1 of both. So beside the bits lies, for each t,
//   factor  what the lane's count is worth: 2 * 4^t over that power of two
//   sum     of the columns of word t
// for a sum over signs of x is twice that over the columns with a +, less that over all.
#pragma once

#include "bcq/gemv.cuh"
#include "lookup/tables.cuh"

namespace localq::bcq {

struct Worth {
  float factor, sum;
};

// Row k, bit j to row j, bit k: of 16 x 16 bits in the low halves of 16 words, and of as many in the high halves.
__device__ __forceinline__ void transpose(uint32_t (&word)[kBits]) {
  constexpr uint32_t kMasks[4] = {0x55555555u, 0x33333333u, 0x0f0f0f0fu, 0x00ff00ffu};
#pragma unroll
  for (int log = 3; log >= 0; --log) {
    const int step = 1 << log;
#pragma unroll
    for (int k = 0; k < int(kBits); ++k) {
      if (k & step) continue;
      const uint32_t swapped = (word[k] >> step ^ word[k + step]) & kMasks[log];
      word[k + step] ^= swapped;
      word[k] ^= swapped << step;
    }
  }
}

// 32 columns of x from `column` on, zeros behind the end; returns the bits of the largest magnitude.
template <typename T>
__device__ __forceinline__ uint32_t load_columns(Eight<T> (&x)[4], const Arguments& p, const T* row, uint32_t column,
                                                 float inverse_rms) {
  uint32_t largest = 0;
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    x[i] = vq::columns_at(p, row, column + 8 * i);
    vq::norm_columns(x[i], p, column + 8 * i, inverse_rms);
  }
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      largest = max(largest, uint32_t(reinterpret_cast<const uint16_t&>(x[i].value[k]) & 0x7fffu));
    }
  }
  return largest;
}

// Word t of a block of columns: its planes to `to`, and what it counts behind them.
template <typename T>
__device__ __forceinline__ void leave_word(uint8_t* to, const Eight<T> (&x)[4], uint32_t largest, uint32_t t) {
  const bool finite = vq::is_finite(largest, T{});
  const int up = min(14 - vq::exponent_of(largest, T{}), 126);
  const float scale = finite ? __int_as_float((127 + up) << 23) : 0.f;
  uint32_t word[kBits];
  int sum = 0;
#pragma unroll
  for (int k = 0; k < int(kBits); ++k) {  // columns k and k + 16; the sum's low bits are the whole number
    const float low = to_float(x[k / 8].value[k % 8]), high = to_float(x[2 + k / 8].value[k % 8]);
    const float a = finite ? low * scale + 12582912.f : 12582912.f, b = finite ? high * scale + 12582912.f : 12582912.f;
    word[k] = __byte_perm(uint32_t(__float_as_int(a)), uint32_t(__float_as_int(b)), 0x5410);
    sum = add_halves(word[k], sum);
  }
  transpose(word);
#pragma unroll
  for (int g = 0; g < 8; ++g) store_bits(to + (4 * g + t) * 8, make_uint2(word[g], word[8 + g]));
  const float down = __int_as_float(finite ? (127 - up) << 23 : 0x7fffffff);
  reinterpret_cast<Worth*>(to + 2 * kColumns)[t] = {down * float(2 << (2 * t)), down * float(sum)};
}

// `count` blocks of columns of x from `first` on to shared memory, of all rows. All threads; then synchronise.
template <typename T, int kRows>
__device__ __forceinline__ void stage(const Arguments& p, const Shared& s, const T* x, float inverse_rms,
                                      uint32_t first, uint32_t count) {
  const uint32_t all = kRows * count * kWords;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i / 32 * 32 < all; i += kThreads) {  // by whole warps
    const uint32_t row = i / kWords % kRows, word = i / kWords / kRows * kWords + i % kWords;
    const bool some = row < uint32_t(p.rows);
    Eight<T> values[4] = {};
    uint32_t largest = 0;
    if (some) largest = load_columns(values, p, x + uint64_t(row) * p.in, first * kColumns + 32 * word, inverse_rms);
    largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
    if (i < all) leave_word(s.x + i / kWords * kXBytes, values, largest, i % kWords);
  }
}

}  // namespace localq::bcq
