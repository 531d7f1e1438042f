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

#include "lookup/intrinsics.cuh"
#include "lookup/rotation.cuh"

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

// Eight values of x from `column` on, zeros behind the end.
template <typename T>
__device__ __forceinline__ Eight<T> columns_at(const Arguments& p, const T* row, uint32_t column) {
  Eight<T> eight = {};
  if (column < p.in) eight = reinterpret_cast<const Eight<T>*>(row + column)[0];
  return eight;
}

// The same normed, where the extras ask for it.
template <typename T>
__device__ __forceinline__ void norm_columns(Eight<T>& eight, const Arguments& p, uint32_t column, float inverse_rms) {
  if (p.extras.norm == NormKind::kNone || column >= p.in) return;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    eight.value[k] = normed(eight.value[k], inverse_rms, p.extras.norm_weight, int(column) + k, p.extras.norm);
  }
}

// The thread's share of the squares of a row.
template <typename T>
__device__ __forceinline__ float squares_of(const Arguments& p, const T* x) {
  float squares = 0.f;
  for (uint32_t i = threadIdx.x; i < p.in / 8; i += kThreads) {
    const Eight<T> eight = reinterpret_cast<const Eight<T>*>(x)[i];
#pragma unroll
    for (int k = 0; k < 8; ++k) squares += to_float(eight.value[k]) * to_float(eight.value[k]);
  }
  return squares;
}

__device__ __forceinline__ float inverse_rms_of(const Arguments& p, float* scratch, float squares) {
  return rsqrtf(block_sum(squares, scratch) / p.in + p.extras.eps);
}

// Threads of a row of x.
template <int kRows>
constexpr uint32_t kRowThreads = kThreads / kRows;

// What a thread asks for of x before it asks for codes: 32 KB of them would be served first. Its first eight columns of
// the slice (of a slice that is rotated, of the first pieces that are turned), as they are, and its share of the
// squares, which are read whole where x is normed.
template <typename T, bool kRotated>
struct Asked {
  Eight<T> ahead[kRotated ? kPiecesAhead : 1];
  float squares;
};

template <typename T, int kRows, bool kRotated>
__device__ __forceinline__ Asked<T, kRotated> ask(const Arguments& p, const Span& span, const T* x) {
  Asked<T, kRotated> asked = {};
  const uint32_t row = threadIdx.x / kRowThreads<kRows>, i = threadIdx.x % kRowThreads<kRows>;
  if constexpr (kRotated) {
    const Turned turned = turned_of(p, span);
#pragma unroll
    for (uint32_t piece = 0; piece < kPiecesAhead; ++piece) {
      const uint32_t column = column_of(turned, piece);
      if (column < turned.turned_end) asked.ahead[piece] = columns_at(p, x, column);
    }
  } else if (row < uint32_t(p.rows)) {
    asked.ahead[0] = columns_at(p, x + uint64_t(row) * p.in, span.column + 8 * i);
  }
  if (p.extras.norm != NormKind::kNone) asked.squares = squares_of(p, x);
  return asked;
}

// The slice of x as it is to `to` of the thread's row; the largest magnitude of the thread, as bits.
template <typename T, int kRows>
__device__ __forceinline__ uint32_t lay(const Arguments& p, const Span& span, const T* x, Eight<T> eight,
                                        float inverse_rms, Eight<T>* to) {
  const uint32_t row = threadIdx.x / kRowThreads<kRows>, first = threadIdx.x % kRowThreads<kRows>;
  uint32_t largest = 0;
#pragma unroll 1
  for (uint32_t i = first; i < p.x_stride / 8; i += kRowThreads<kRows>) {
    const uint32_t column = span.column + 8 * i;
    if (i != first && row < uint32_t(p.rows)) eight = columns_at(p, x + uint64_t(row) * p.in, column);
    norm_columns(eight, p, column, inverse_rms);
    to[i] = eight;
#pragma unroll
    for (int k = 0; k < 8; ++k) largest = max(largest, magnitude(eight.value[k]));
  }
  return largest;
}

// The slice of x to shared memory, as f16 with a power of two for each row. s.largest is zero. All threads, some warps
// for each row; then synchronise. `minus`: the signs that were asked for.
template <typename T, int kRows, bool kRotated>
__device__ __forceinline__ void stage(const Arguments& p, const Span& span, const Shared& s, const T* x,
                                      const Asked<T, kRotated>& asked, const Minus& minus) {
  constexpr uint32_t kApart = kRowThreads<kRows>;
  const bool norm = p.extras.norm != NormKind::kNone;
  const float inverse_rms = norm ? inverse_rms_of(p, s.scratch, asked.squares) : 0.f;
  const uint32_t row = threadIdx.x / kApart, first = threadIdx.x % kApart, words = p.x_stride / 8;
  auto* const to = reinterpret_cast<Eight<T>*>(s.x + row * p.x_stride);
  uint32_t largest;
  if constexpr (kRotated) {
    largest = lay_rotated(p, span, s, minus, to[0].value, [&](uint32_t piece, uint32_t column) {
      Eight<T> eight = piece == 0 ? asked.ahead[0] : asked.ahead[1];
      if (piece >= kPiecesAhead) eight = columns_at(p, x, column);
      norm_columns(eight, p, column, inverse_rms);
      return eight;
    });
  } else {
    largest = lay<T, kRows>(p, span, x, asked.ahead[0], inverse_rms, to);
  }
  largest = __reduce_max_sync(~0u, largest);
  if (threadIdx.x % 32 == 0) atomicMax(&s.largest[row], largest);  // the same whatever the order
  __syncthreads();
  largest = s.largest[row];
  const bool finite = is_finite(largest, T{});
  const int up = min(14 - exponent_of(largest, T{}), 126);
  const float factor = __int_as_float((127 + up) << 23);
  if (first == 0) s.back[row] = __int_as_float(finite ? (127 - up) << 23 : 0x7fffffff);
#pragma unroll 1
  for (uint32_t i = first; i < words; i += kApart) {  // where x is not rotated, each thread what it wrote itself
    const Eight<T> own = to[i];
    Eight<__half> out;
#pragma unroll
    for (int k = 0; k < 8; ++k) out.value[k] = __float2half_rn(finite ? to_float(own.value[k]) * factor : 0.f);
    reinterpret_cast<Eight<__half>*>(to)[i] = out;
  }
}

// Where in s.x the window of a column of a product begins: `lane` of the lane, `tile` of (B, q, high).
template <int kRows>
struct Windows {
  uint32_t stride, x_stride, lane;
  bool high;  // the high halves of the words are positions of the table (kRows = 1)

  __device__ __forceinline__ Windows(const Arguments& p, const Step& step, uint32_t table, uint32_t half)
      : stride(step.stride), x_stride(p.x_stride), high(step.positions<kRows>(table) > 64 * half + kGroup) {
    const uint32_t g = threadIdx.x % 32 / 4, pair = g / 2, odd = g % 2;
    lane = step.window + 2 * (threadIdx.x % 4) + stride * positions_of_table<kRows>() * table;
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

// The warp's half of the words and its first 16 codes of two; none where that half of the table has no positions.
struct Part {
  uint32_t half, m;
  bool some;
};

template <int kRows>
__device__ __forceinline__ Part part_of(const Step& step, uint32_t table) {
  const uint32_t warp = warp_number(), half = warp / 8;
  const uint32_t positions = step.positions<kRows>(table);
  return {half, 2 * (warp % 8), positions > half * (kRows == 1 ? 64 : kRows == 2 ? 32 : 0)};
}

// The warp's codewords, twice 16, as operands A. They do not depend on x. Of codewords with more than 16 weights this
// is the first half; the second is loaded where it is needed, because registers are short.
struct Codewords {
  uint4 word[2];
};

template <int kRows>
__device__ __forceinline__ const uint4* fragments_of(const Step& step) {
  return step.fragments + part_of<kRows>(step, 0).m * step.codeword_steps * 32 + threadIdx.x % 32;
}

template <int kRows>
__device__ __forceinline__ Codewords load_codewords(const Step& step) {
  Codewords words = {};
  if (!part_of<kRows>(step, 0).some) return words;
  const uint4* const from = fragments_of<kRows>(step);
#pragma unroll
  for (int i = 0; i < 2; ++i) words.word[i] = __ldg(from + i * step.codeword_steps * 32);
  return words;
}

// What a lane has of the windows of x, operands B: [b, q][high half of the word][register].
using Operands = uint32_t[4][2][2];

// The columns `from` .. `from` + 15 of every window.
template <int kRows>
__device__ __forceinline__ void load_operands(Operands& x, const Shared& s, const Windows<kRows>& windows,
                                              uint32_t from) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const auto* word = reinterpret_cast<const uint32_t*>(s.x + from + windows.at(i / 4, i / 2 % 2, i % 2));
    x[i / 2][i % 2][0] = word[0], x[i / 2][i % 2][1] = word[4];
  }
}

// 16 codes of the table: their entries in 32 words, [upper 8 of them][B][word].
template <int kRows>
__device__ __forceinline__ void make_words(uint32_t (&word)[2][2][4], const Shared& s, const Windows<kRows>& windows,
                                           const Operands& x, const uint4& first, const uint4* second) {
  float c[4][2][4] = {};  // [b, q][high half of the word]
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    mma(c[i / 2][i % 2], {first.x, first.y, first.z, first.w}, x[i / 2][i % 2][0], x[i / 2][i % 2][1], __half{});
  }
  if (second != nullptr) {  // a codeword has more than 16 weights
    const uint4 rest = load_fragment(second);
    Operands behind;
    load_operands<kRows>(behind, s, windows, 16);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      mma(c[i / 2][i % 2], {rest.x, rest.y, rest.z, rest.w}, behind[i / 2][i % 2][0], behind[i / 2][i % 2][1],
          __half{});
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int n = 0; n < 4; ++n) word[n / 2][i / 2][2 * (i % 2) + n % 2] = pack(c[i][0][n], c[i][1][n], __half{});
  }
}

// Table `of_step` of `step`, as number `number`. A warp makes 32 codes of one half of the words, 16 at a time.
template <int kRows>
__device__ __forceinline__ void build_table(const Arguments& p, const Shared& s, const Step& step, uint32_t of_step,
                                            uint32_t number, const Codewords& codewords) {
  const Part part = part_of<kRows>(step, of_step);
  if (!part.some) return;
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const Windows<kRows> windows(p, step, of_step, part.half);
  const uint4* const second = step.codeword_steps == 1 ? nullptr : fragments_of<kRows>(step) + 32;
  uint8_t* const table = s.tables + number * kTableBytes + 128 * part.half + 16 * t;
  const bool odd = g % 2;
  Operands x;
  load_operands<kRows>(x, s, windows, 0);
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    uint32_t word[2][2][4];
    make_words<kRows>(word, s, windows, x, codewords.word[k], second == nullptr ? nullptr : second + 64 * k);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint8_t* const row = table + (16 * (part.m + k) + 8 * i + g) * kEntryBytes;
      const uint32_t (&w)[2][4] = word[i];
      const uint4 low = make_uint4(w[0][0], w[0][1], w[0][2], w[0][3]);
      const uint4 high = make_uint4(w[1][0], w[1][1], w[1][2], w[1][3]);
      store_words(row + (odd ? 64 : 0), odd ? high : low);
      store_words(row + (odd ? 0 : 64), odd ? low : high);
    }
  }
}

// The tables of `step`, from number `number` on.
template <int kRows>
__device__ __forceinline__ void build(const Arguments& p, const Shared& s, const Step& step, uint32_t number,
                                      const Codewords& codewords) {
  const bool two = step.two_tables<kRows>();
#pragma unroll 1
  for (uint32_t table = 0; table <= uint32_t(two); ++table) {
    build_table<kRows>(p, s, step, table, number + table, codewords);
  }
}

}  // namespace localq::vq
