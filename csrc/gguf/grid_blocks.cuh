// Block types whose codes are places in a grid: the magnitudes of 8 columns (IQ2) or 4 (IQ3), with a sign for each
// column.
//
// A lane has eight columns of a row in each run of 32: one code of IQ2, two of IQ3. The grid lies in shared memory, a
// byte a magnitude. Bytes become f16 numbers exactly, signs are bits of theirs; the sum of a run of 32 columns is
// multiplied by its scale in f32. IQ2_XS and IQ2_S have a scale for 16 columns, half an odd integer, by which the
// numbers are multiplied in f16: 11 bits together, exact.
#pragma once

#include "gguf/grids.cuh"
#include "gguf/legacy_blocks.cuh"

namespace localq::gguf {

// Signs 2 j and 2 j + 1 of eight as sign bits of two halves.
__device__ __forceinline__ uint32_t sign_bits(uint32_t signs, int j) {
  return (signs >> (2 * j)) * 0x40008000u & 0x80008000u;
}

// The operands A of words 0 and 1: magnitudes of eight columns of rows g and g + 8, and their signs.
__device__ __forceinline__ void signed_values(uint32_t (&a)[2][4], const uint2 (&magnitudes)[2],
                                              const uint32_t (&signs)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    a[0][row] = two_bytes(magnitudes[row].x, 0) ^ sign_bits(signs[row], 0);
    a[0][row + 2] = two_bytes(magnitudes[row].x, 2) ^ sign_bits(signs[row], 1);
    a[1][row] = two_bytes(magnitudes[row].y, 0) ^ sign_bits(signs[row], 2);
    a[1][row + 2] = two_bytes(magnitudes[row].y, 2) ^ sign_bits(signs[row], 3);
  }
}

// Four magnitudes of a grid of IQ3, whose places have 3 bits.
template <class ValueOf>
__device__ __forceinline__ uint32_t four_bytes(uint32_t places, const ValueOf& value_of) {
  uint32_t bytes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) bytes |= value_of(places >> (3 * i) & 7u) << (8 * i);
  return bytes;
}

// Seven stored signs and the eighth, which makes the number of negative ones even.
__device__ __forceinline__ uint32_t eight_signs(uint32_t seven) {
  return seven | uint32_t(__popc(seven) & 1) << 7;
}

// Four times seven signs in a word, then a scale.
struct PairedSigns {
  uint32_t word;

  __device__ __forceinline__ uint32_t signs(uint32_t t) const {
    return eight_signs(word >> (7 * t) & 127u);
  }
  __device__ __forceinline__ float scale() const {
    return float(word >> 28) + 0.5f;
  }
};

// Words of PairedSigns of rows g and g + 8 in run `run`, from `words` on.
__device__ __forceinline__ void paired_signs(PairedSigns (&of_rows)[2], const uint8_t* words, uint32_t run) {
  const uint2 pair = reinterpret_cast<const uint2*>(words)[run * 8 + threadIdx.x % 32 / 4];
  of_rows[0] = {pair.x}, of_rows[1] = {pair.y};
}

// What a lane has of a run of 32 columns of rows g and g + 8: places in the grid, and signs if they lie apart.
struct OfRun {
  uint32_t codes, signs;
};

__device__ __forceinline__ uint32_t word_of(uint4 words, uint32_t i) {
  return i < 2 ? (i == 0 ? words.x : words.y) : i == 2 ? words.z : words.w;
}
__device__ __forceinline__ uint32_t half_of(uint4 words, uint32_t i) {
  return word_of(words, i / 2) >> (16 * (i % 2)) & 0xffffu;
}

// 16 bytes of each lane, from `from` on.
__device__ __forceinline__ uint4 lane_words(const uint8_t* from) {
  return words_at(from + threadIdx.x % 32 * 16);
}

// The grid of an IQ2 type: 8, 25 or 43 for each of eight columns.
__device__ __forceinline__ void fill_grid_of_eights(uint8_t* table, const uint16_t* grid, uint32_t count) {
  for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
    const uint32_t places = grid[i];
    uint32_t words[2] = {};
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      words[k / 4] |= (0x2b1908u >> (8 * (places >> (2 * k) & 3u)) & 0xffu) << (8 * (k % 4));
    }
    reinterpret_cast<uint2*>(table)[i] = {words[0], words[1]};
  }
}

struct IQ2_XXSCodes {
  static constexpr int kItemBlocks = 2, kWordsAt = 512, kNumbersAt = 1024, kBytes = kNumbersAt + 32;
  static constexpr uint32_t kTableBytes = 8 * 256;
  static constexpr float kUnit = 0.25f;

  static __device__ __forceinline__ void fill_table(uint8_t* table) {
    fill_grid_of_eights(table, kGridIQ2_XXS, 256);
  }
  struct Held {
    uint4 codes;

    __device__ __forceinline__ explicit Held(const uint8_t* block) : codes(lane_words(block)) {
    }
    __device__ __forceinline__ OfRun run(uint32_t i) const {
      return {half_of(codes, i), 0u};
    }
  };
  static __device__ __forceinline__ OfRun run_at(const uint8_t* block, uint32_t run) {
    return {reinterpret_cast<const uint16_t*>(block + threadIdx.x % 32 * 16)[run], 0u};
  }

  static __device__ __forceinline__ void values(uint32_t (&a)[2][4], float2& scale, OfRun of, const uint8_t* block,
                                                const uint8_t* table, uint32_t run) {
    const auto* const grid = reinterpret_cast<const uint2*>(table);
    PairedSigns of_rows[2];
    paired_signs(of_rows, block + kWordsAt, run);
    const uint32_t t = threadIdx.x % 4;
    signed_values(a, {grid[of.codes & 0xffu], grid[of.codes >> 8]}, {of_rows[0].signs(t), of_rows[1].signs(t)});
    scale = {of_rows[0].scale(), of_rows[1].scale()};
  }
};

// A word of codes of each run: of IQ2_XS 16 bits of row g and of row g + 8; of IQ3, four columns each, the lower eight
// bits of two of row g and two of row g + 8.
struct WordsOfRuns {
  uint4 codes[2];

  __device__ __forceinline__ explicit WordsOfRuns(const uint8_t* block)
      : codes{lane_words(block), lane_words(block + 512)} {
  }
  __device__ __forceinline__ uint32_t run(uint32_t i) const {
    return word_of(codes[i / 4], i % 4);
  }
  static __device__ __forceinline__ uint32_t run_at(const uint8_t* block, uint32_t run) {
    return word_at(block + run / 4 * 512 + threadIdx.x % 32 * 16 + run % 4 * 4);
  }
};

// Multiplies the operands A of words 0 and 1 by twice the scales of the 16 columns in which the lane's lie: nibbles of
// the bytes [16 rows][8 runs] from `scales` on.
__device__ __forceinline__ void scale_halves_of_run(uint32_t (&a)[2][4], const uint8_t* scales, uint32_t run) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, shift = lane % 4 / 2 * 4;
  const uint32_t low = scales[g * 8 + run] >> shift & 15u, upper = scales[(g + 8) * 8 + run] >> shift & 15u;
  const __half2 of_rows[2] = {twice(float(2 * low + 1)), twice(float(2 * upper + 1))};
#pragma unroll
  for (int word = 0; word < 2; ++word) scale_codes(a[word], of_rows[0], of_rows[1]);
}

struct IQ2_XSCodes {
  static constexpr int kItemBlocks = 1, kScalesAt = 1024, kNumbersAt = 1152, kBytes = kNumbersAt + 32;
  static constexpr uint32_t kTableBytes = 8 * 512;
  static constexpr float kUnit = 0.125f;

  static __device__ __forceinline__ void fill_table(uint8_t* table) {
    fill_grid_of_eights(table, kGridIQ2_XS, 512);
  }
  struct Held {
    WordsOfRuns codes;

    __device__ __forceinline__ explicit Held(const uint8_t* block) : codes(block) {
    }
    __device__ __forceinline__ OfRun run(uint32_t i) const {
      return {codes.run(i), 0u};
    }
  };
  static __device__ __forceinline__ OfRun run_at(const uint8_t* block, uint32_t run) {
    return {WordsOfRuns::run_at(block, run), 0u};
  }

  static __device__ __forceinline__ void values(uint32_t (&a)[2][4], float2& scale, OfRun of, const uint8_t* block,
                                                const uint8_t* table, uint32_t run) {
    const auto* const grid = reinterpret_cast<const uint2*>(table);
    const uint32_t low = of.codes & 0xffffu, upper = of.codes >> 16;
    signed_values(a, {grid[low & 511u], grid[upper & 511u]}, {eight_signs(low >> 9), eight_signs(upper >> 9)});
    scale_halves_of_run(a, block + kScalesAt, run);
    scale = {1.f, 1.f};
  }
};

struct IQ2_SCodes {
  static constexpr int kItemBlocks = 1, kHighAt = 512, kSignsAt = 640, kScalesAt = 1152, kNumbersAt = 1280;
  static constexpr int kBytes = kNumbersAt + 32;
  static constexpr uint32_t kTableBytes = 8 * 1024;
  static constexpr float kUnit = 0.125f;

  static __device__ __forceinline__ void fill_table(uint8_t* table) {
    fill_grid_of_eights(table, kGridIQ2_S, 1024);
  }
  struct Held {
    uint4 codes, signs;

    __device__ __forceinline__ explicit Held(const uint8_t* block)
        : codes(lane_words(block)), signs(lane_words(block + kSignsAt)) {
    }
    __device__ __forceinline__ OfRun run(uint32_t i) const {
      return {half_of(codes, i), half_of(signs, i)};
    }
  };
  static __device__ __forceinline__ OfRun run_at(const uint8_t* block, uint32_t run) {
    const uint8_t* const of_lane = block + threadIdx.x % 32 * 16;
    return {reinterpret_cast<const uint16_t*>(of_lane)[run],
            reinterpret_cast<const uint16_t*>(of_lane + kSignsAt)[run]};
  }

  static __device__ __forceinline__ void values(uint32_t (&a)[2][4], float2& scale, OfRun of, const uint8_t* block,
                                                const uint8_t* table, uint32_t run) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    // Bits 8 and 9 of the codes of columns 8 t ... 8 t + 7 of row g, and from bit 8 on of row g + 8.
    const uint32_t high = uint32_t(reinterpret_cast<const uint16_t*>(block + kHighAt)[run * 8 + g]) >> (2 * t);
    const auto* const grid = reinterpret_cast<const uint2*>(table);
    const uint32_t low = (of.codes & 0xffu) | (high & 3u) << 8, upper = of.codes >> 8 | (high >> 8 & 3u) << 8;
    signed_values(a, {grid[low], grid[upper]}, {of.signs & 0xffu, of.signs >> 8});
    scale_halves_of_run(a, block + kScalesAt, run);
    scale = {1.f, 1.f};
  }
};

struct IQ3_XXSCodes {
  static constexpr int kItemBlocks = 1, kWordsAt = 1024, kNumbersAt = 1536, kBytes = kNumbersAt + 32;
  static constexpr uint32_t kTableBytes = 4 * 256;
  static constexpr float kUnit = 0.5f;

  static __device__ __forceinline__ void fill_table(uint8_t* table) {
    for (uint32_t i = threadIdx.x; i < 256; i += blockDim.x) {
      const auto value_of = [](uint32_t place) { return 4 + 8 * place + (place == 7 ? 2 : 0); };
      reinterpret_cast<uint32_t*>(table)[i] = four_bytes(kGridIQ3_XXS[i], value_of);
    }
  }
  struct Held {
    WordsOfRuns codes;

    __device__ __forceinline__ explicit Held(const uint8_t* block) : codes(block) {
    }
    __device__ __forceinline__ OfRun run(uint32_t i) const {
      return {codes.run(i), 0u};
    }
  };
  static __device__ __forceinline__ OfRun run_at(const uint8_t* block, uint32_t run) {
    return {WordsOfRuns::run_at(block, run), 0u};
  }

  static __device__ __forceinline__ void values(uint32_t (&a)[2][4], float2& scale, OfRun of, const uint8_t* block,
                                                const uint8_t* table, uint32_t run) {
    const uint32_t codes = of.codes, t = threadIdx.x % 4;
    const auto* const grid = reinterpret_cast<const uint32_t*>(table);
    PairedSigns of_rows[2];
    paired_signs(of_rows, block + kWordsAt, run);
    signed_values(a, {{grid[codes & 0xffu], grid[codes >> 8 & 0xffu]}, {grid[codes >> 16 & 0xffu], grid[codes >> 24]}},
                  {of_rows[0].signs(t), of_rows[1].signs(t)});
    scale = {of_rows[0].scale(), of_rows[1].scale()};
  }
};

struct IQ3_SCodes {
  static constexpr int kItemBlocks = 1, kHighAt = 1024, kSignsAt = 1152, kScalesAt = 1664, kNumbersAt = 1728;
  static constexpr int kBytes = kNumbersAt + 32;
  static constexpr uint32_t kTableBytes = 4 * 512;
  static constexpr float kUnit = 1.f;

  static __device__ __forceinline__ void fill_table(uint8_t* table) {
    for (uint32_t i = threadIdx.x; i < 512; i += blockDim.x) {
      reinterpret_cast<uint32_t*>(table)[i] = four_bytes(kGridIQ3_S[i], [](uint32_t place) { return 2 * place + 1; });
    }
  }
  struct Held {
    WordsOfRuns codes;
    uint4 signs;

    __device__ __forceinline__ explicit Held(const uint8_t* block) : codes(block), signs(lane_words(block + kSignsAt)) {
    }
    __device__ __forceinline__ OfRun run(uint32_t i) const {
      return {codes.run(i), half_of(signs, i)};
    }
  };
  static __device__ __forceinline__ OfRun run_at(const uint8_t* block, uint32_t run) {
    const uint8_t* const signs = block + kSignsAt + threadIdx.x % 32 * 16;
    return {WordsOfRuns::run_at(block, run), reinterpret_cast<const uint16_t*>(signs)[run]};
  }

  static __device__ __forceinline__ void values(uint32_t (&a)[2][4], float2& scale, OfRun of, const uint8_t* block,
                                                const uint8_t* table, uint32_t run) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, codes = of.codes, signs = of.signs;
    // Bits 8: of columns 8 t ... 8 t + 3 and 8 t + 4 ... 8 t + 7 of row g, and from bit 8 on of row g + 8.
    const uint32_t high = uint32_t(reinterpret_cast<const uint16_t*>(block + kHighAt)[run * 8 + g]) >> (2 * t);
    const auto* const grid = reinterpret_cast<const uint32_t*>(table);
    const auto place = [&](int byte, int bit) { return (codes >> (8 * byte) & 0xffu) | (high >> bit & 1u) << 8; };
    signed_values(a, {{grid[place(0, 0)], grid[place(1, 1)]}, {grid[place(2, 8)], grid[place(3, 9)]}},
                  {signs & 0xffu, signs >> 8});
    const auto* const scales = block + kScalesAt;
    const uint32_t low = scales[g * 4 + run / 2], upper = scales[(g + 8) * 4 + run / 2], shift = 4 * (run % 2);
    scale = {float(2 * (low >> shift & 15u) + 1), float(2 * (upper >> shift & 15u) + 1)};
  }
};

template <class Codes>
struct Grid256 : Codes {
  static constexpr int kColumns = 256, kRun = 0;
  static constexpr uint32_t kGridBytes = Codes::kTableBytes;
  static constexpr bool kSplit = false;

  // The scale of a run: the number of the block, times the integer or half integer of the run, times a power of two.
  static __device__ __forceinline__ float2 scale_of_run(float2 numbers, float2 of_run) {
    return {__fmul_rn(__fmul_rn(numbers.x, of_run.x), Codes::kUnit),
            __fmul_rn(__fmul_rn(numbers.y, of_run.y), Codes::kUnit)};
  }

  static __device__ __forceinline__ void product(float (&sum)[4], const uint8_t* item, const X& x, int blocks) {
#pragma unroll 1
    for (int i = 0; i < Codes::kItemBlocks; ++i) {
      if (i >= blocks) break;
      const uint8_t* const block = item + i * Codes::kBytes;
      const float2 numbers = pair_at(block + Codes::kNumbersAt);
      const typename Codes::Held held(block);
#pragma unroll
      for (int run = 0; run < 8; ++run) {
        uint32_t a[2][4];
        float2 of_run;
        Codes::values(a, of_run, held.run(run), block, x.table, run);
        const uint4 b = x.eight(256 * i + 32 * run + 8 * (threadIdx.x % 4));
        float c[4] = {};
        multiply(c, a[0], b.x, b.y);
        multiply(c, a[1], b.z, b.w);
        add_scaled(sum, c, scale_of_run(numbers, of_run));
      }
    }
  }

  static __device__ __forceinline__ void weights(float (&w)[2][8], const uint8_t* block, const uint8_t* table,
                                                 uint32_t run) {
    uint32_t a[2][4];
    float2 of_run;
    Codes::values(a, of_run, Codes::run_at(block, run), block, table, run);
    scale_values(w, a, scale_of_run(pair_at(block + Codes::kNumbersAt), of_run));
  }
};

using IQ2_XXS = Grid256<IQ2_XXSCodes>;
using IQ2_XS = Grid256<IQ2_XSCodes>;
using IQ2_S = Grid256<IQ2_SCodes>;
using IQ3_XXS = Grid256<IQ3_XXSCodes>;
using IQ3_S = Grid256<IQ3_SCodes>;

}  // namespace localq::gguf
