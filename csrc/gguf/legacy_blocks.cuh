// Block types of 32 columns: one scale, and perhaps a minimum, for a block.
#pragma once

#include "gguf/products.cuh"

namespace localq::gguf {

// A block type whose products need no table in shared memory.
struct NoTable {
  static constexpr uint32_t kTableBytes = 0;
  static __device__ __forceinline__ void fill_table(uint8_t*) {
  }
};

// f16 numbers of a tile block at `from`, in pairs of rows g and g + 8.
__device__ __forceinline__ float2 pair_at(const uint8_t* from) {
  return both_rows(word_at(from + threadIdx.x % 32 / 4 * 4));
}

// The operand A of codes from `offset` lower: exact numbers q - offset, those of rows g in units of 2^-10 and of rows
// g + 8 in units of 2^-6. One FMA for two weights.
template <int kOffset>
__device__ __forceinline__ void subtract_offset(uint32_t (&a)[4]) {
  const __half2 up = twice(16384.f);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __half2 less = twice(-kOffset * (i % 2 == 0 ? 1.f / 1024.f : 1.f / 64.f));
    a[i] = as<uint32_t>(__hfma2(as<__half2>(a[i]), up, less));
  }
}

// Codes of 4 or 5 bits.
template <int kBits, bool kMinimum>
struct Nibbles32 : NoTable {
  static constexpr int kColumns = 32, kItemBlocks = 8, kRun = kMinimum ? 32 : 0;
  static constexpr int kBitsAt = 256, kScaleAt = kBitsAt + (kBits == 5 ? 64 : 0), kMinimumAt = kScaleAt + 32;
  static constexpr int kBytes = kMinimumAt + (kMinimum ? 32 : 0);
  static constexpr bool kSplit = false;
  static constexpr int kOffset = kMinimum ? 0 : kBits == 5 ? 16 : 8;

  // Words 0 and 1 of the lane, codes in their places.
  static __device__ __forceinline__ void codes(uint32_t (&a)[2][4], const uint8_t* block) {
    const uint32_t lane = threadIdx.x % 32;
    const uint2 words = reinterpret_cast<const uint2*>(block)[lane];
    spread_nibbles(a[0], words.x);
    spread_nibbles(a[1], words.y);
    if constexpr (kBits == 5) {
      const uint32_t stored = reinterpret_cast<const uint16_t*>(block + kBitsAt)[lane];
      const uint32_t bits = __byte_perm(stored, 0u, 0x4140);
      add_fifth_bits<0>(a[0], bits);
      add_fifth_bits<1>(a[1], bits);
    }
  }

  static __device__ __forceinline__ void product(float (&sum)[4], const uint8_t* item, const X& x, int blocks) {
    const uint32_t t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < kItemBlocks; ++i) {
      if (i >= blocks) break;
      const uint8_t* const block = item + i * kBytes;
      uint32_t a[2][4];
      codes(a, block);
      const uint4 b = x.eight(32 * i + 8 * t);
      float c[4] = {};
      if constexpr (!kMinimum) subtract_offset<kOffset>(a[0]), subtract_offset<kOffset>(a[1]);
      multiply(c, a[0], b.x, b.y);
      multiply(c, a[1], b.z, b.w);
      const float2 scale = pair_at(block + kScaleAt);
      constexpr float kBack = kMinimum ? 16777216.f : 1024.f;
      add_scaled(sum, c, {scale.x * kBack, scale.y * (kBack / 16.f)});
    }
    if constexpr (kMinimum) {
      const uint32_t first = 2 * t, at = kMinimumAt + threadIdx.x % 32 / 4 * 4;
      const uint32_t one = int(first) < blocks ? word_at(item + first * kBytes + at) : 0u;
      const uint32_t other = int(first) + 1 < blocks ? word_at(item + (first + 1) * kBytes + at) : 0u;
      const uint32_t minimums[2] = {__byte_perm(one, other, 0x5410), __byte_perm(one, other, 0x7632)};
      subtract_minimums(sum, minimums, x.two_sums(first), {-1.f, -1.f});
    }
  }

  static __device__ __forceinline__ void weights(float (&w)[2][8], const uint8_t* block, uint32_t) {
    uint32_t a[2][4];
    codes(a, block);
    const float2 scale = pair_at(block + kScaleAt);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int2 q = codes_of<4>(a, i);
      w[0][i] = __fmul_rn(scale.x, float(q.x - kOffset)), w[1][i] = __fmul_rn(scale.y, float(q.y - kOffset));
    }
    if constexpr (kMinimum) {
      const float2 minimum = pair_at(block + kMinimumAt);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        w[0][i] = __fadd_rn(w[0][i], minimum.x), w[1][i] = __fadd_rn(w[1][i], minimum.y);
      }
    }
  }
};

using Q4_0 = Nibbles32<4, false>;
using Q4_1 = Nibbles32<4, true>;
using Q5_0 = Nibbles32<5, false>;
using Q5_1 = Nibbles32<5, true>;

// Two words of bytes, the first of row g and the second of row g + 8, as the operand A.
__device__ __forceinline__ void spread_two_rows(uint32_t (&a)[4], uint32_t low, uint32_t high) {
  spread_bytes(a[0], a[2], low);
  spread_bytes(a[1], a[3], high);
}

// scale * value of operands that hold the values themselves: of words 0 and 1.
__device__ __forceinline__ void scale_values(float (&w)[2][8], const uint32_t (&a)[2][4], float2 scale) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 low = both_rows(a[i / 2][i % 2 * 2]), high = both_rows(a[i / 2][i % 2 * 2 + 1]);
    w[0][2 * i] = __fmul_rn(scale.x, low.x), w[0][2 * i + 1] = __fmul_rn(scale.x, low.y);
    w[1][2 * i] = __fmul_rn(scale.y, high.x), w[1][2 * i + 1] = __fmul_rn(scale.y, high.y);
  }
}

// A block type of 32 columns whose codes are values of 8 bits, or places in a table of them. `Codes` has its sizes and
// `values`: the operands A of words 0 and 1, in products with what lies in shared memory beside x.
template <class Codes>
struct Values32 : Codes {
  static constexpr int kColumns = 32, kRun = 0;
  static constexpr bool kSplit = false;

  static __device__ __forceinline__ void product(float (&sum)[4], const uint8_t* item, const X& x, int blocks) {
#pragma unroll
    for (int i = 0; i < Codes::kItemBlocks; ++i) {
      if (i >= blocks) break;
      const uint8_t* const block = item + i * Codes::kBytes;
      uint32_t a[2][4];
      Codes::values(a, block, x);
      const uint4 b = x.eight(32 * i + 8 * (threadIdx.x % 4));
      float c[4] = {};
      multiply(c, a[0], b.x, b.y);
      multiply(c, a[1], b.z, b.w);
      add_scaled(sum, c, pair_at(block + Codes::kScaleAt));
    }
  }

  static __device__ __forceinline__ void weights(float (&w)[2][8], const uint8_t* block, uint32_t) {
    uint32_t a[2][4];
    Codes::values(a, block);
    scale_values(w, a, pair_at(block + Codes::kScaleAt));
  }
};

struct Q8_0Codes : NoTable {
  static constexpr int kItemBlocks = 4, kScaleAt = 512, kBytes = kScaleAt + 32;

  static __device__ __forceinline__ void values(uint32_t (&a)[2][4], const uint8_t* block, const X&) {
    values(a, block);
  }

  static __device__ __forceinline__ void values(uint32_t (&a)[2][4], const uint8_t* block) {
    const uint4 words = words_at(block + threadIdx.x % 32 * 16);
    spread_two_rows(a[0], words.x, words.y);
    spread_two_rows(a[1], words.z, words.w);
  }
};
using Q8_0 = Values32<Q8_0Codes>;

}  // namespace localq::gguf
