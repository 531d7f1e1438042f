// vq_gemv: the slice of x in shared memory, and the tables of inner products that tensor cores compute from it.
//
// Entry k of a position is the sum over j of codeword[k][j] * x[stride * position + j]: m16n8k16 with 16 codewords as A
// and the windows of 8 positions (or of 4 positions and two rows of x, ..) as B. x is f16 times a power of two per row
// and slice that puts its largest value between 2^14 and 2^15: bf16 and f16 both convert without rounding down to 2^-29
// of it, and because the magnitudes of a codeword sum to at most 1, no entry exceeds f16 either. Sums are f32; entries
// are rounded once, to f16.
//
// Row k of a table has 64 words; word w holds two entries of code k:
//   1 row of x    low: position 64 * (w / 32) + w % 32, high: the position 32 later
//   2 rows        position w, the two rows
//   4 rows        position w / 2, rows 2 * (w % 2) and the next
//   8 rows        position w / 4, rows 2 * (w % 4) and the next
// so that the lanes of a warp, one position each, never conflict in a bank, whatever their codes.
//
// A warp computes 32 codes x 32 words. Column g of a product is word 16 B + 4 (g / 2) + 2 q + g % 2, so lane (g, t)
// ends with four adjacent words for each B of 0 and 1, and stores 16 bytes. Lanes with odd g begin with the other B, so
// that no eight lanes of a store conflict in a bank.
#pragma once

#include "lookup/intrinsics.cuh"
#include "lookup/rotation.cuh"

namespace localq::vq {

// Exponent of the largest value of a row, from the bits of its magnitude; and whether it is finite.
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

// Eight values of x from `column`, zeros past the end.
template <typename T>
__device__ __forceinline__ Eight<T> columns_at(const Arguments& p, const T* row, uint32_t column) {
  Eight<T> eight = {};
  if (column < p.in) eight = reinterpret_cast<const Eight<T>*>(row + column)[0];
  return eight;
}

// The same, normalized if there is a norm.
template <typename T>
__device__ __forceinline__ void norm_columns(Eight<T>& eight, const Arguments& p, uint32_t column, float inverse_rms) {
  if (p.extras.norm == NormKind::kNone || column >= p.in) return;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    eight.value[k] = normed(eight.value[k], inverse_rms, p.extras.norm_weight, int(column) + k, p.extras.norm);
  }
}

// The thread's part of the sum of squares of a row.
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

// Threads per row of x.
template <int kRows>
constexpr uint32_t kRowThreads = kThreads / kRows;

// The loads of x that a thread issues before its codes, of which 32 KB would otherwise be served first: its first eight
// columns of the slice (if rotated, of the first pieces), unchanged, and its part of the squares, which need the whole
// row if there is a norm.
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

// Copies the slice of x, not rotated, to `to` of the thread's row; returns the largest magnitude of the thread, as
// bits.
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

// Copies the slice of x to shared memory, as f16 times a power of two per row. s.largest is zero on entry. Called by
// all threads, some warps per row; the block must synchronize afterwards. `minus`: the signs loaded in advance.
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
  if (threadIdx.x % 32 == 0) atomicMax(&s.largest[row], largest);  // independent of the order
  __syncthreads();
  largest = s.largest[row];
  const bool finite = is_finite(largest, T{});
  const int up = min(14 - exponent_of(largest, T{}), 126);
  const float factor = __int_as_float((127 + up) << 23);
  if (first == 0) s.back[row] = __int_as_float(finite ? (127 - up) << 23 : 0x7fffffff);
#pragma unroll 1
  for (uint32_t i = first; i < words; i += kApart) {  // without a rotation each thread its own words
    const Eight<T> own = to[i];
    Eight<__half> out;
#pragma unroll
    for (int k = 0; k < 8; ++k) out.value[k] = __float2half_rn(finite ? to_float(own.value[k]) * factor : 0.f);
    reinterpret_cast<Eight<__half>*>(to)[i] = out;
  }
}

// The position in s.x at which the window of a column of a product begins: `lane` is the part of the lane, `tile` that
// of (B, q, high).
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

// The warp's half of the words and its first 16 codes of two; none if that half of the table has no positions.
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

// The warp's codewords, twice 16, as operands A; independent of x. Of codewords with more than 16 weights this is the
// first half; the second is loaded at the point of use to save registers.
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

// A lane's windows of x, operands B: [b, q][high half of the word][register].
using Operands = uint32_t[4][2][2];

// Columns `from` .. `from` + 15 of every window.
template <int kRows>
__device__ __forceinline__ void load_operands(Operands& x, const Shared& s, const Windows<kRows>& windows,
                                              uint32_t from) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const auto* word = reinterpret_cast<const uint32_t*>(s.x + from + windows.at(i / 4, i / 2 % 2, i % 2));
    x[i / 2][i % 2][0] = word[0], x[i / 2][i % 2][1] = word[4];
  }
}

// Entries of 16 codes of the table in 32 words, [upper 8 of them][B][word].
template <int kRows>
__device__ __forceinline__ void make_words(uint32_t (&word)[2][2][4], const Shared& s, const Windows<kRows>& windows,
                                           const Operands& x, const uint4& first, const uint4* second) {
  float c[4][2][4] = {};  // [b, q][high half of the word]
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    mma(c[i / 2][i % 2], {first.x, first.y, first.z, first.w}, x[i / 2][i % 2][0], x[i / 2][i % 2][1], __half{});
  }
  if (second != nullptr) {  // the codeword has more than 16 weights
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

// Table `of_step` of `step`, as number `number`. A warp computes 32 codes of one half of the words, 16 at a time.
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

// The tables of `step`, from number `number`.
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
