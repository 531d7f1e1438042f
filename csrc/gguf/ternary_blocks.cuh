// Block types of 256 columns whose values are -1, 0 and 1: IQ1, of which a code is eight of them in a grid, which are
// shifted by 1/8, and TQ.
//
// IQ1: eight times a shifted value is an integer of up to 9; times the integer scale of 16 or 32 columns, of up to 15,
// it is the operand A, exactly. An FMA makes two of them of the grid's numbers, which lie in shared memory as nibbles.
// Sums run through 256 columns and are multiplied by the number of the block in f32.
#pragma once

#include "gguf/grid_iq1.cuh"
#include "gguf/legacy_blocks.cuh"

namespace localq::gguf {

// What a lane has of eight columns of a row: their place in the grid, the odd integer scale, and whether the shift is
// -1/8.
struct ShiftedCode {
  uint32_t place, scale;
  bool is_negative;
};

// The operands A of a row (0: row g, 1: row g + 8) in units of 2^-15: (8 value +- 1) * scale. `entry` of the grid has
// values + 1 of columns 0, 2, 4, 6 in nibbles of the lower half, those of columns 1, 3, 5, 7 in the upper half.
__device__ __forceinline__ void shifted_values(uint32_t (&a)[2][4], int row, uint32_t entry, const ShiftedCode& code) {
  const __half2 scale = __hsub2(as<__half2>(code.scale * 0x00010001u | 0x64006400u), twice(1024.f));
  const __half2 near = __hmul2(scale, twice(4096.f)), far = __hmul2(scale, twice(256.f));
  const uint32_t of_one = code.is_negative ? 0x8c808c80u : 0x8b008b00u;  // -9 * 2^-15, -7 * 2^-15
  const __half2 shift = __hmul2(scale, as<__half2>(of_one));
#pragma unroll
  for (int word = 0; word < 2; ++word) {
    const uint32_t nibbles = entry >> (8 * word);
    a[word][row] = as<uint32_t>(__hfma2(as<__half2>(nibbles & kLowNibbles), near, shift));
    a[word][row + 2] = as<uint32_t>(__hfma2(as<__half2>(nibbles & kHighNibbles), far, shift));
  }
}

__device__ __forceinline__ uint32_t sixteen_bits_of(uint4 words, uint32_t i) {
  const uint32_t word = i < 4 ? (i < 2 ? words.x : words.y) : i < 6 ? words.z : words.w;
  return word >> (16 * (i % 2)) & 0xffffu;
}

// Codes of 8 columns, their lower eight bits: 16 bytes a lane, of a run those of rows g and g + 8. Then 16 bits of each
// row and run.
struct IQ1Codes {
  uint4 codes;

  __device__ __forceinline__ explicit IQ1Codes(const uint8_t* block) : codes(words_at(block + threadIdx.x % 32 * 16)) {
  }
  __device__ __forceinline__ uint32_t low(uint32_t run, int row) const {
    return sixteen_bits_of(codes, run) >> (8 * row) & 0xffu;
  }
  static __device__ __forceinline__ uint32_t bits_of_rows(const uint8_t* block, uint32_t run) {
    return word_at(block + 512 + (run * 8 + threadIdx.x % 32 / 4) * 4);
  }
};

// Bits of a run: four times the upper three of a code, the scale, the sign of the shift.
struct IQ1_SCodes : IQ1Codes {
  static constexpr int kBytes = 800;

  const uint8_t* block;

  __device__ __forceinline__ explicit IQ1_SCodes(const uint8_t* from) : IQ1Codes(from), block(from) {
  }
  __device__ __forceinline__ float2 numbers() const {
    return pair_at(block + 768);
  }
  __device__ __forceinline__ ShiftedCode of(uint32_t run, uint32_t both, int row) const {
    const uint32_t bits = both >> (16 * row) & 0xffffu;
    const uint32_t high = bits >> (3 * (threadIdx.x % 4)) & 7u;
    return {low(run, row) | high << 8, 2 * (bits >> 12 & 7u) + 1, bits >> 15 != 0};
  }
};

// Bits of a run: four times the upper three of a code and the sign of its shift. Scales of 16 columns and the number of
// the block share a header of four times 16 bits.
struct IQ1_MCodes : IQ1Codes {
  static constexpr int kBytes = 896;

  uint2 headers[2];

  __device__ __forceinline__ explicit IQ1_MCodes(const uint8_t* block) : IQ1Codes(block) {
    const auto* const of_rows = reinterpret_cast<const uint2*>(block + 768);
    headers[0] = of_rows[threadIdx.x % 32 / 4], headers[1] = of_rows[threadIdx.x % 32 / 4 + 8];
  }
  static __device__ __forceinline__ float number(uint2 header) {
    const uint32_t low = (header.x >> 12 & 0xfu) | (header.x >> 24 & 0xf0u);
    const uint32_t high = (header.y >> 4 & 0xf00u) | (header.y >> 16 & 0xf000u);
    return __half2float(as<__half>(uint16_t(low | high)));
  }
  __device__ __forceinline__ float2 numbers() const {
    return {number(headers[0]), number(headers[1])};
  }
  __device__ __forceinline__ ShiftedCode of(uint32_t run, uint32_t both, int row) const {
    const uint32_t t = threadIdx.x % 4, bits = both >> (16 * row + 4 * t) & 15u;
    const uint32_t words = run < 4 ? headers[row].x : headers[row].y;
    const uint32_t scale = words >> (16 * (run / 2 % 2) + 6 * (run % 2) + 3 * (t / 2)) & 7u;
    return {low(run, row) | (bits & 7u) << 8, 2 * scale + 1, bits >> 3 != 0};
  }
};

template <class Codes>
struct Shifted256 {
  static constexpr int kColumns = 256, kItemBlocks = 2, kRun = 0, kBytes = Codes::kBytes;
  static constexpr uint32_t kTableBytes = 4 * 2048, kGridBytes = kTableBytes;
  static constexpr bool kSplit = false;
  static constexpr float kUnit = 4096.f;  // 2^15, less the factor 8 of values

  // Called by all threads; a barrier must follow.
  static __device__ __forceinline__ void fill_table(uint8_t* table) {
    for (uint32_t i = threadIdx.x; i < 2048; i += blockDim.x) {
      const uint32_t places = kGridIQ1[i];
      uint32_t entry = 0;
#pragma unroll
      for (int k = 0; k < 8; ++k) entry |= (places >> (2 * k) & 3u) << (4 * (k / 2) + 16 * (k % 2));
      reinterpret_cast<uint32_t*>(table)[i] = entry;
    }
  }

  // The operands A of words 0 and 1 of a run.
  static __device__ __forceinline__ void values(uint32_t (&a)[2][4], const Codes& codes, const uint8_t* block,
                                                const uint8_t* table, uint32_t run) {
    const uint32_t both = Codes::bits_of_rows(block, run);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const ShiftedCode code = codes.of(run, both, row);
      shifted_values(a, row, reinterpret_cast<const uint32_t*>(table)[code.place], code);
    }
  }

  static __device__ __forceinline__ void product(float (&sum)[4], const uint8_t* item, const X& x, int blocks) {
#pragma unroll 1
    for (int i = 0; i < kItemBlocks; ++i) {
      if (i >= blocks) break;
      const uint8_t* const block = item + i * kBytes;
      const Codes codes(block);
      float c[4] = {};
#pragma unroll
      for (int run = 0; run < 8; ++run) {
        uint32_t a[2][4];
        values(a, codes, block, x.table, run);
        const uint4 b = x.eight(256 * i + 32 * run + 8 * (threadIdx.x % 4));
        multiply(c, a[0], b.x, b.y);
        multiply(c, a[1], b.z, b.w);
      }
      const float2 numbers = codes.numbers();
      add_scaled(sum, c, {numbers.x * kUnit, numbers.y * kUnit});
    }
  }

  // Number times integer is exact in f32, as is the definition, which multiplies scale and number first.
  static __device__ __forceinline__ void weights(float (&w)[2][8], const uint8_t* block, const uint8_t* table,
                                                 uint32_t run) {
    const Codes codes(block);
    uint32_t a[2][4];
    values(a, codes, block, table, run);
    const float2 numbers = codes.numbers();
    scale_values(w, a, {numbers.x * kUnit, numbers.y * kUnit});
  }
};

using IQ1_S = Shifted256<IQ1_SCodes>;
using IQ1_M = Shifted256<IQ1_MCodes>;

// Pairs of bits, as in Q2_K; a value is the code less 1.
struct TQ2_0 : NoTable {
  static constexpr int kColumns = 256, kItemBlocks = 2, kRun = 0, kNumbersAt = 1024, kBytes = kNumbersAt + 32;
  static constexpr bool kSplit = true;

  // 16 columns of a word: values in units of 2^-10, of rows g + 8 of 2^-8.
  template <int kWord>
  static __device__ __forceinline__ void values(uint32_t (&a)[4], uint32_t word) {
    spread_pairs<kWord>(a, word);
    const __half2 up = twice(16384.f);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = as<uint32_t>(__hfma2(as<__half2>(a[i]), up, twice(i % 2 == 0 ? -1.f / 1024.f : -1.f / 256.f)));
    }
  }

  static __device__ __forceinline__ float2 scales(const uint8_t* block) {
    const float2 d = pair_at(block + kNumbersAt);
    return {d.x * 1024.f, d.y * 256.f};
  }

  static __device__ __forceinline__ void product(float (&sum)[4], const uint8_t* item, const X& x, int blocks) {
    const uint32_t lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll 1
    for (int i = 0; i < kItemBlocks; ++i) {
      if (i >= blocks) break;
      const uint8_t* const block = item + i * kBytes;
      float c[4] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 four = words_at(block + (32 * half + lane) * 16);
        const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {  // 32 columns
          const uint32_t column = 256 * i + 128 * half + 32 * j + 4 * t;
          uint32_t a[2][4];
          values<0>(a[0], words[j]);
          values<1>(a[1], words[j]);
          const uint2 b[2] = {x.four(column), x.four(column + 16)};
          multiply(c, a[0], b[0].x, b[0].y);
          multiply(c, a[1], b[1].x, b[1].y);
        }
      }
      add_scaled(sum, c, scales(block));
    }
  }

  static __device__ __forceinline__ void weights(float (&w)[2][8], const uint8_t* block, uint32_t run) {
    const uint32_t word = word_at(block + (run / 4 * 32 + threadIdx.x % 32) * 16 + run % 4 * 4);
    uint32_t a[2][4];
    values<0>(a[0], word);
    values<1>(a[1], word);
    scale_values(w, a, scales(block));
  }
};

// A byte is a fraction in units of 1/256: three times it has the first digit in bits 8 and 9 and the fraction of the
// others below. 32 bytes of a row have digits of 160 columns, 16 the next 80 and 4 the last 16; of a byte digit i
// belongs to the i-th 32, 16 or 4 of these columns. In a word lie the bytes of columns c, c + 2, c + 1, c + 3.
struct TQ1_0 : NoTable {
  static constexpr int kColumns = 256, kItemBlocks = 2, kRun = 0, kMiddleAt = 512, kLastAt = 768, kNumbersAt = 832;
  static constexpr int kBytes = kNumbersAt + 32;
  static constexpr bool kSplit = true;

  // Fractions of four columns of rows g and g + 8, in the order of the operand A.
  struct Fractions {
    uint32_t of[4];

    __device__ __forceinline__ Fractions(uint32_t low, uint32_t high)
        : of{low & 0x00ff00ffu, high & 0x00ff00ffu, low >> 8 & 0x00ff00ffu, high >> 8 & 0x00ff00ffu} {
    }
    // Without the digits before the one that `power` of 3 stands for.
    __device__ __forceinline__ void skip(uint32_t power) {
#pragma unroll
      for (int i = 0; i < 4; ++i) of[i] = of[i] * power & 0x00ff00ffu;
    }
    // The operand A of the next digits less 1, in units of 2^-10.
    __device__ __forceinline__ void take(uint32_t (&a)[4]) {
      const __half2 up = twice(64.f), less = twice(-1.f / 1024.f);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t thrice = 3 * of[i];
        a[i] = as<uint32_t>(__hfma2(as<__half2>(thrice & 0x03000300u), up, less));
        of[i] = thrice & 0x00ff00ffu;
      }
    }
  };

  static __device__ __forceinline__ uint32_t power_of_3(uint32_t digit) {
    return digit < 2 ? (digit == 0 ? 1 : 3) : digit == 2 ? 9 : digit == 3 ? 27 : 81;
  }

  static __device__ __forceinline__ uint2 two_words(const uint8_t* from) {
    return *reinterpret_cast<const uint2*>(from);
  }

  static __device__ __forceinline__ float2 scales(const uint8_t* block) {
    const float2 d = pair_at(block + kNumbersAt);
    return {d.x * 1024.f, d.y * 1024.f};
  }

  static __device__ __forceinline__ void add_step(float (&c)[4], Fractions& fractions, const X& x, uint32_t column) {
    uint32_t a[4];
    fractions.take(a);
    const uint2 b = x.four(column + 4 * (threadIdx.x % 4));
    multiply(c, a, b.x, b.y);
  }

  static __device__ __forceinline__ void product(float (&sum)[4], const uint8_t* item, const X& x, int blocks) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (int i = 0; i < kItemBlocks; ++i) {
      if (i >= blocks) break;
      const uint8_t* const block = item + i * kBytes;
      const uint4 first = words_at(block + lane * 16);
      const uint2 middle = two_words(block + kMiddleAt + lane * 8), last = two_words(block + kLastAt + g * 8);
      Fractions near(first.x, first.y), far(first.z, first.w), next(middle.x, middle.y), end(last.x, last.y);
      float c[4] = {};
#pragma unroll
      for (int digit = 0; digit < 5; ++digit) {
        add_step(c, near, x, 256 * i + 32 * digit);
        add_step(c, far, x, 256 * i + 32 * digit + 16);
        add_step(c, next, x, 256 * i + 160 + 16 * digit);
      }
      end.skip(power_of_3(t));
      add_step(c, end, x, 256 * i + 240);
      add_scaled(sum, c, scales(block));
    }
  }

  // The operand A of 16 columns from 16 `step` on.
  static __device__ __forceinline__ void values(uint32_t (&a)[4], const uint8_t* block, uint32_t step) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint8_t* const at = step < 10   ? block + lane * 16 + step % 2 * 8
                              : step < 15 ? block + kMiddleAt + lane * 8
                                          : block + kLastAt + g * 8;
    const uint2 words = two_words(at);
    Fractions fractions(words.x, words.y);
    fractions.skip(power_of_3(step < 10 ? step / 2 : step < 15 ? step - 10 : t));
    fractions.take(a);
  }

  static __device__ __forceinline__ void weights(float (&w)[2][8], const uint8_t* block, uint32_t run) {
    uint32_t a[2][4];
    values(a[0], block, 2 * run);
    values(a[1], block, 2 * run + 1);
    scale_values(w, a, scales(block));
  }
};

}  // namespace localq::gguf
