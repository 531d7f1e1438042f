// vq_gemv: the slice of x in shared memory, and the tables of inner products that tensor cores make of it.
//
// Entry k of a position is the sum over j of codeword[k][j] * x[stride * position + j]: m16n8k16 with 16 codewords as A
// and the windows of 8 positions (or of 4 positions and two rows of x, ..) as B. x is f16 times a power of two of its
// own for each row and slice, so that its largest value lies between 2^14 and 2^15: bf16 and f16 both become f16
// without a rounding down to 2^-29 of that, and as no codeword sums up to more than 1, no entry exceeds f16 either. The
// sums are f32, the entries are rounded once, to f16.
//
// Row k of a table has 64 words; word w holds two entries of code k:
//   1 row of x    low: position 64 * (w / 32) + w % 32, high: the position 32 behind it
//   2 rows        position w, the two rows
//   4 rows        position w / 2, rows 2 * (w % 2) and the one behind it
//   8 rows        position w / 4, rows 2 * (w % 4) and the one behind it
// so that the lanes of a warp, one position each, never meet in a bank, whatever their codes.
//
// A warp makes 32 codes x 32 words. Column g of a product is word 16 B + 4 (g / 2) + 2 q + g % 2, so that lane (g, t)
// is left with four words behind each other for each B of 0 and 1. It stores 16 bytes; lanes with an odd g begin with
// the other B, so that no eight lanes that store together meet in a bank.
#pragma once

#include "vq_gemv.cuh"
#include "vq_machine.cuh"

namespace localq::vq {

// Exponent of the largest value of a row, from the bits of its magnitude, and whether it is finite.
__device__ __forceinline__ int exponent_of(uint32_t bits, __half) {
  return int(max(bits >> 10, 1u)) - 15;
}
__device__ __forceinline__ int exponent_of(uint32_t bits, __nv_bfloat16) {
  return int(max(bits >> 7, 1u)) - 127;
}
__device__ __forceinline__ bool is_finite(uint32_t bits, __half) {
  return bits < 0x7c00u;
}
__device__ __forceinline__ bool is_finite(uint32_t bits, __nv_bfloat16) {
  return bits < 0x7f80u;
}

// Eight values of x from `column` on, zeros behind the end, normed where the extras ask for it.
template <typename T>
__device__ __forceinline__ Eight<T> load_x(const Arguments& p, const T* row, uint32_t column, float inverse_rms) {
  Eight<T> eight = {};
  if (column >= p.in) return eight;
  eight = reinterpret_cast<const Eight<T>*>(row + column)[0];
  if (p.extras.norm == NormKind::kNone) return eight;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    eight.value[k] = normed(eight.value[k], inverse_rms, p.extras.norm_weight, int(column) + k, p.extras.norm);
  }
  return eight;
}

template <typename T>
__device__ __forceinline__ float inverse_rms_of(const Arguments& p, const Shared& s, const T* x) {
  float squares = 0.f;
  for (uint32_t i = threadIdx.x; i < p.in / 8; i += kThreads) {
    const Eight<T> eight = reinterpret_cast<const Eight<T>*>(x)[i];
#pragma unroll
    for (int k = 0; k < 8; ++k) squares += to_float(eight.value[k]) * to_float(eight.value[k]);
  }
  return rsqrtf(block_sum(squares, s.scratch) / p.in + p.extras.eps);
}

// The slice of x to shared memory, as f16 with a power of two for each row. s.largest is zero. All threads; then
// synchronise.
template <typename T, int kRows>
__device__ __forceinline__ void stage(const Arguments& p, const Span& span, const Shared& s, const T* x) {
  const float inverse_rms = p.extras.norm == NormKind::kNone ? 0.f : inverse_rms_of(p, s, x);
  const uint32_t words = p.x_stride / 8;
#pragma unroll 1
  for (int row = 0; row < kRows; ++row) {
    uint32_t largest = 0;
    for (uint32_t i = threadIdx.x; i < words; i += kThreads) {
      Eight<T> eight = {};
      if (row < p.rows) eight = load_x(p, x + uint64_t(row) * p.in, span.column + 8 * i, inverse_rms);
      reinterpret_cast<Eight<T>*>(s.x + row * p.x_stride)[i] = eight;
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        largest = max(largest, uint32_t(reinterpret_cast<const uint16_t&>(eight.value[k]) & 0x7fffu));
      }
    }
    largest = __reduce_max_sync(~0u, largest);
    if (threadIdx.x % 32 == 0) atomicMax(&s.largest[row], largest);  // the same whatever the order
  }
  __syncthreads();
#pragma unroll 1
  for (int row = 0; row < kRows; ++row) {
    const bool finite = is_finite(s.largest[row], T{});
    const int up = min(14 - exponent_of(s.largest[row], T{}), 126);
    const float factor = __int_as_float((127 + up) << 23);
    if (threadIdx.x == 0) s.back[row] = __int_as_float(finite ? (127 - up) << 23 : 0x7fffffff);
    for (uint32_t i = threadIdx.x; i < words; i += kThreads) {  // each thread what it wrote itself
      Eight<T> eight = reinterpret_cast<const Eight<T>*>(s.x + row * p.x_stride)[i];
      Eight<__half> out;
#pragma unroll
      for (int k = 0; k < 8; ++k) out.value[k] = __float2half_rn(finite ? to_float(eight.value[k]) * factor : 0.f);
      reinterpret_cast<Eight<__half>*>(s.x + row * p.x_stride)[i] = out;
    }
  }
}

// Where in s.x the window of a column of a product begins: `lane` of the lane, `tile` of (B, q, high).
template <int kRows>
struct Windows {
  uint32_t stride, x_stride, lane;
  bool high;  // the high halves of the words are positions of the table (kRows = 1)

  __device__ __forceinline__ Windows(const Arguments& p, const Span& span, const Step& step, uint32_t half)
      : stride(p.book[step.book].stride), x_stride(p.x_stride), high(step.end - step.position > 64 * half + kGroup) {
    const uint32_t g = threadIdx.x % 32 / 4, pair = g / 2, odd = g % 2;
    lane = step.position * stride - span.column + 2 * (threadIdx.x % 4);
    if (kRows == 1) lane += stride * (64 * half + 4 * pair + odd);
    if (kRows == 2) lane += stride * (32 * half + 4 * pair + odd);
    if (kRows == 4) lane += stride * (16 * half + 2 * pair) + 2 * odd * x_stride;
    if (kRows == 8) lane += stride * (8 * half + pair) + 2 * odd * x_stride;
  }
  __device__ __forceinline__ uint32_t at(uint32_t b, uint32_t q, uint32_t upper) const {
    if (kRows == 1) return lane + stride * (16 * b + 2 * q + (high ? 32 * upper : 0));
    if (kRows == 2) return lane + stride * (16 * b + 2 * q) + upper * x_stride;
    if (kRows == 4) return lane + stride * (8 * b + q) + upper * x_stride;
    return lane + stride * 4 * b + (4 * q + upper) * x_stride;
  }
};

// 16 codes of the table: their entries in 32 words, from a lane's part of the codewords (`fragments`; more behind them
// where a codeword has more than 16 weights).
template <int kRows>
__device__ __forceinline__ void build_codes(uint4 (&low)[2], uint4 (&high)[2], const Shared& s,
                                            const Windows<kRows>& windows, const uint4* fragments, uint32_t steps) {
  const uint4 first = __ldg(fragments), second = steps == 1 ? first : __ldg(fragments + 32);
  const uint32_t a[2][4] = {{first.x, first.y, first.z, first.w}, {second.x, second.y, second.z, second.w}};
  uint32_t word[2][2][4];  // [upper 8 of the codes][B][word]
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int b = i / 2, q = i % 2;
    float c[2][4] = {};  // [high half of the word]
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const auto* x = reinterpret_cast<const uint32_t*>(s.x + windows.at(b, q, upper));
      mma(c[upper], a[0], x[0], x[4], __half{});
      if (steps != 1) mma(c[upper], a[1], x[8], x[12], __half{});
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) word[k / 2][b][2 * q + k % 2] = pack(c[0][k], c[1][k], __half{});
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    low[i] = make_uint4(word[i][0][0], word[i][0][1], word[i][0][2], word[i][0][3]);
    high[i] = make_uint4(word[i][1][0], word[i][1][1], word[i][1][2], word[i][1][3]);
  }
}

// The table of `step`, as number `number`. A warp makes 32 codes of one half of the words, or nothing where that half
// has no positions.
template <int kRows>
__device__ __forceinline__ void build(const Arguments& p, const Span& span, const Shared& s, const Step& step,
                                      uint32_t number) {
  const uint32_t warp = warp_number(), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, half = warp / 8;
  if (step.end - step.position <= half * (kRows == 1 ? 64 : kRows == 2 ? 32 : 0)) return;
  const uint32_t steps = p.book[step.book].steps;
  const uint4* const fragments = p.segment[place_of(p, span, step.first).segment].fragments[step.book];
  const Windows<kRows> windows(p, span, step, half);
  uint8_t* const table = s.tables + number * kTableBytes;
  const bool odd = g % 2;
#pragma unroll 1
  for (uint32_t m = 2 * (warp % 8); m < 2 * (warp % 8) + 2; ++m) {
    uint4 low[2], high[2];
    build_codes<kRows>(low, high, s, windows, fragments + m * steps * 32 + lane, steps);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint8_t* const row = table + (16 * m + 8 * i + g) * kEntryBytes + 128 * half + 16 * t;
      store_words(row + (odd ? 64 : 0), odd ? high[i] : low[i]);
      store_words(row + (odd ? 0 : 64), odd ? low[i] : high[i]);
    }
  }
}

}  // namespace localq::vq
