// Block types of 256 columns with scales of 16 or 32 columns, which are small integers times a number of the block.
//
// Where code times integer scale has at most 11 bits (all but Q6_K), the product is the operand A, exactly: one
// multiplication for two weights, and sums go through all 256 columns before they are multiplied by the number of the
// block. Minimums are a product of their own, of 16 rows with the sums of x (x.cuh).
#pragma once

#include "gguf/legacy_blocks.cuh"

namespace localq::gguf {

constexpr float kOperandUnit = 1.f / 524288.f;  // 2^-19: unit of operands that are codes times scales

// Byte k of `bytes`, less `offset`, times 2^kPower, in both halves: exact.
template <int kPower, int kOffset>
__device__ __forceinline__ __half2 scale_of_byte(uint32_t bytes, int k) {
  constexpr float kUp = float(1 << kPower);
  return __hfma2(spread_byte(bytes, k), twice(kUp), twice(-kUp * (1024 + kOffset)));
}

// d and dmin of a row's header, in one word.
__device__ __forceinline__ float2 d_and_dmin(uint32_t word) {
  return both_rows(word);
}

// Scales (`low`, `high`: of runs 0 to 3 and 4 to 7) or minimums of eight runs of a row, a byte each.
struct Eight6Bits {
  uint32_t low, high;
  __device__ __forceinline__ uint32_t of(int run) const {
    return run < 4 ? low : high;
  }
};

// Sixteen bytes of Q4_K and Q5_K: d, dmin, then scales and minimums of 6 bits.
struct Header6Bits {
  uint4 words;
  __device__ __forceinline__ Eight6Bits scales() const {
    return {words.y & 0x3f3f3f3fu, (words.w & 0x0f0f0f0fu) | (words.y >> 2 & 0x30303030u)};
  }
  __device__ __forceinline__ Eight6Bits minimums() const {
    return {words.z & 0x3f3f3f3fu, (words.w >> 4 & 0x0f0f0f0fu) | (words.z >> 2 & 0x30303030u)};
  }
};

// Q4_K, and with fifth bits Q5_K.
template <int kBits>
struct Nibbles256 : NoTable {
  static constexpr int kColumns = 256, kItemBlocks = 1, kRun = 32;
  static constexpr int kBitsAt = 2048, kHeaderAt = kBitsAt + (kBits == 5 ? 512 : 0), kBytes = kHeaderAt + 256;
  static constexpr bool kSplit = false;

  // Codes in their places: words 0 and 1 of 32 columns, of whose 64 the lane has `words`.
  template <int kHalf>
  static __device__ __forceinline__ void codes(uint32_t (&a)[2][4], const uint4& words, uint32_t bits) {
    spread_nibbles(a[0], kHalf == 0 ? words.x : words.z);
    spread_nibbles(a[1], kHalf == 0 ? words.y : words.w);
    if constexpr (kBits == 5) {
      add_fifth_bits<2 * kHalf>(a[0], bits);
      add_fifth_bits<2 * kHalf + 1>(a[1], bits);
    }
  }

  static __device__ __forceinline__ uint32_t bits_at(const uint8_t* block, int i) {
    return kBits == 5 ? word_at(block + kBitsAt + threadIdx.x % 32 * 16 + 4 * i) : 0u;
  }

  template <int kHalf>
  static __device__ __forceinline__ void add_run(float (&c)[4], const uint4& words, uint32_t bits, const X& x, int run,
                                                 const Eight6Bits& low, const Eight6Bits& high) {
    uint32_t a[2][4];
    codes<kHalf>(a, words, bits);
    const __half2 scales[2] = {scale_of_byte<5, 0>(low.of(run), run % 4), scale_of_byte<1, 0>(high.of(run), run % 4)};
    const uint4 b = x.eight(32 * run + 8 * (threadIdx.x % 4));
    scale_codes(a[0], scales[0], scales[1]);
    multiply(c, a[0], b.x, b.y);
    scale_codes(a[1], scales[0], scales[1]);
    multiply(c, a[1], b.z, b.w);
  }

  static __device__ __forceinline__ void product(float (&sum)[4], const uint8_t* block, const X& x, int) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const Header6Bits header[2] = {{words_at(block + kHeaderAt + g * 16)},
                                   {words_at(block + kHeaderAt + 128 + g * 16)}};
    const Eight6Bits low = header[0].scales(), high = header[1].scales();
    float c[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 words = words_at(block + (32 * i + lane) * 16);
      const uint32_t bits = bits_at(block, i);
      add_run<0>(c, words, bits, x, 2 * i, low, high);
      add_run<1>(c, words, bits, x, 2 * i + 1, low, high);
    }
    const float2 of_low = d_and_dmin(header[0].words.x), of_high = d_and_dmin(header[1].words.x);
    add_scaled(sum, c, {of_low.x / kOperandUnit, of_high.x / kOperandUnit});
    const Eight6Bits less_low = header[0].minimums(), less_high = header[1].minimums();
    const uint32_t minimums[2] = {two_bytes(less_low.of(int(2 * t)), 2 * t % 4),
                                  two_bytes(less_high.of(int(2 * t)), 2 * t % 4)};
    subtract_minimums(sum, minimums, x.two_sums(2 * t), {of_low.y, of_high.y});
  }

  // d * scale and dmin * minimum of a run of a row.
  static __device__ __forceinline__ float2 affine(const uint8_t* header, uint32_t run) {
    const Header6Bits of = {words_at(header)};
    const float2 d = d_and_dmin(of.words.x);
    const uint32_t scale = of.scales().of(int(run)) >> (8 * (run % 4)) & 63u;
    const uint32_t minimum = of.minimums().of(int(run)) >> (8 * (run % 4)) & 63u;
    return {__fmul_rn(d.x, float(scale)), __fmul_rn(d.y, float(minimum))};
  }

  static __device__ __forceinline__ void weights(float (&w)[2][8], const uint8_t* block, uint32_t run) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4;
    const uint4 words = words_at(block + (run / 2 * 32 + lane) * 16);
    const uint32_t bits = bits_at(block, int(run / 2));
    uint32_t a[2][4];
    if (run % 2 == 0) {
      codes<0>(a, words, bits);
    } else {
      codes<1>(a, words, bits);
    }
    const float2 low = affine(block + kHeaderAt + g * 16, run), high = affine(block + kHeaderAt + 128 + g * 16, run);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int2 q = codes_of<4>(a, i);
      w[0][i] = __fadd_rn(__fmul_rn(low.x, float(q.x)), -low.y);
      w[1][i] = __fadd_rn(__fmul_rn(high.x, float(q.y)), -high.y);
    }
  }
};

using Q4_K = Nibbles256<4>;
using Q5_K = Nibbles256<5>;

struct Q6_K : NoTable {
  static constexpr int kColumns = 256, kItemBlocks = 1, kRun = 0, kBytes = 3360;
  static constexpr int kBitsAt = 2048, kScalesAt = 3072, kDAt = 3328;
  static constexpr bool kSplit = true;

  // A row's 16 scales + 128, run by run.
  static __device__ __forceinline__ float scale_of_run(const uint4& scales, int run) {
    const uint32_t words[4] = {scales.x, scales.y, scales.z, scales.w};
    return byte_to_float(words[run / 4], run % 4) - 128.f;
  }

  static __device__ __forceinline__ void product(float (&sum)[4], const uint8_t* block, const X& x, int) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint4 scales[2] = {words_at(block + kScalesAt + g * 16), words_at(block + kScalesAt + 128 + g * 16)};
    float all[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 four = words_at(block + (32 * i + lane) * 16);
      const uint2 two = *reinterpret_cast<const uint2*>(block + kBitsAt + (i / 2 * 32 + lane) * 16 + i % 2 * 8);
      const uint32_t words[4] = {four.x, four.y, four.z, four.w}, bits[2] = {two.x, two.y};
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // 16 columns
        uint32_t a[4];
        spread_nibbles(a, words[j]);
        if (j % 2 == 0) {
          add_sixth_bits<0>(a, bits[j / 2]);
        } else {
          add_sixth_bits<1>(a, bits[j / 2]);
        }
        subtract_offset<32>(a);
        const uint2 b = x.four(64 * i + 16 * j + 4 * t);
        float c[4] = {};
        multiply(c, a, b.x, b.y);
        add_scaled(all, c, {scale_of_run(scales[0], 4 * i + j), scale_of_run(scales[1], 4 * i + j)});
      }
    }
    const float2 d = pair_at(block + kDAt);
    add_scaled(sum, all, {d.x * 1024.f, d.y * 64.f});
  }

  static __device__ __forceinline__ void weights(float (&w)[2][8], const uint8_t* block, uint32_t run) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4;
    const uint2 words = *reinterpret_cast<const uint2*>(block + (run / 2 * 32 + lane) * 16 + run % 2 * 8);
    const uint32_t bits = word_at(block + kBitsAt + (run / 4 * 32 + lane) * 16 + run % 4 * 4);
    uint32_t a[2][4];
    spread_nibbles(a[0], words.x);
    spread_nibbles(a[1], words.y);
    add_sixth_bits<0>(a[0], bits);
    add_sixth_bits<1>(a[1], bits);
    const float2 d = pair_at(block + kDAt);
    const uint8_t* const scales = block + kScalesAt + g * 16 + 2 * run;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int2 q = codes_of<4>(a, i);
      const float low = __fmul_rn(d.x, float(int(scales[i / 4]) - 128));
      const float high = __fmul_rn(d.y, float(int(scales[128 + i / 4]) - 128));
      w[0][i] = __fmul_rn(low, float(q.x - 32)), w[1][i] = __fmul_rn(high, float(q.y - 32));
    }
  }
};

struct Q2_K : NoTable {
  static constexpr int kColumns = 256, kItemBlocks = 1, kRun = 16, kBytes = 1344;
  static constexpr int kScalesAt = 1024, kDAt = 1280;
  static constexpr bool kSplit = true;

  static __device__ __forceinline__ void product(float (&sum)[4], const uint8_t* block, const X& x, int) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint4 both[2] = {words_at(block + kScalesAt + g * 16), words_at(block + kScalesAt + 128 + g * 16)};
    const uint32_t low[4] = {both[0].x, both[0].y, both[0].z, both[0].w};
    const uint32_t high[4] = {both[1].x, both[1].y, both[1].z, both[1].w};
    float c[4] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 four = words_at(block + (32 * i + lane) * 16);
      const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int j = 0; j < 8; ++j) {  // 16 columns
        const int run = 8 * i + j;
        uint32_t a[4];
        if (j % 2 == 0) {
          spread_pairs<0>(a, words[j / 2]);
        } else {
          spread_pairs<1>(a, words[j / 2]);
        }
        scale_codes(a, scale_of_byte<5, 0>(low[run / 4] & 0x0f0f0f0fu, run % 4),
                    scale_of_byte<3, 0>(high[run / 4] & 0x0f0f0f0fu, run % 4));
        const uint2 b = x.four(16 * run + 4 * t);
        multiply(c, a, b.x, b.y);
      }
    }
    const float2 of_low = d_and_dmin(word_at(block + kDAt + g * 4));
    const float2 of_high = d_and_dmin(word_at(block + kDAt + 32 + g * 4));
    add_scaled(sum, c, {of_low.x / kOperandUnit, of_high.x / kOperandUnit});
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // minimums of eight runs
      const uint32_t minimums[2] = {two_bytes((t < 2 ? low[2 * i] : low[2 * i + 1]) >> 4 & 0x0f0f0f0fu, 2 * t % 4),
                                    two_bytes((t < 2 ? high[2 * i] : high[2 * i + 1]) >> 4 & 0x0f0f0f0fu, 2 * t % 4)};
      subtract_minimums(sum, minimums, x.two_sums(8 * i + 2 * t), {of_low.y, of_high.y});
    }
  }

  // A weight from d and dmin, the byte with scale and minimum of its run, and its code.
  static __device__ __forceinline__ float affine_value(float2 d, uint32_t byte, int q) {
    return __fadd_rn(__fmul_rn(__fmul_rn(d.x, float(byte & 15u)), float(q)), -__fmul_rn(d.y, float(byte >> 4)));
  }

  static __device__ __forceinline__ void weights(float (&w)[2][8], const uint8_t* block, uint32_t run) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4;
    const uint32_t word = word_at(block + (run / 4 * 32 + lane) * 16 + run % 4 * 4);
    uint32_t a[2][4];
    spread_pairs<0>(a[0], word);
    spread_pairs<1>(a[1], word);
    const float2 low = d_and_dmin(word_at(block + kDAt + g * 4));
    const float2 high = d_and_dmin(word_at(block + kDAt + 32 + g * 4));
    const uint8_t* const scales = block + kScalesAt + g * 16 + 2 * run;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int2 q = codes_of<2>(a, i);
      w[0][i] = affine_value(low, scales[i / 4], q.x), w[1][i] = affine_value(high, scales[128 + i / 4], q.y);
    }
  }
};

struct Q3_K : NoTable {
  static constexpr int kColumns = 256, kItemBlocks = 1, kRun = 0, kBytes = 1760;
  static constexpr int kBitsAt = 1024, kScalesAt = 1536, kDAt = 1728;
  static constexpr bool kSplit = true;

  // A row's 16 scales + 32, a byte each.
  static __device__ __forceinline__ void unpack_scales(uint32_t (&scales)[4], const uint8_t* from) {
    const uint32_t a = word_at(from), b = word_at(from + 4), high = word_at(from + 8);
    scales[0] = (a & 0x0f0f0f0fu) | (high << 4 & 0x30303030u);
    scales[1] = (b & 0x0f0f0f0fu) | (high << 2 & 0x30303030u);
    scales[2] = (a >> 4 & 0x0f0f0f0fu) | (high & 0x30303030u);
    scales[3] = (b >> 4 & 0x0f0f0f0fu) | (high >> 2 & 0x30303030u);
  }

  template <int kWord>
  static __device__ __forceinline__ void add_run(float (&c)[4], uint32_t word, uint32_t bits, uint2 b, __half2 low,
                                                 __half2 high) {
    uint32_t a[4];
    spread_pairs<kWord % 2>(a, word);
    add_third_bits<kWord>(a, bits);
    // (q - 4) * scale = q * scale - 4 * scale, all exact; 4 in units of the codes of rows g and g + 8
    const __half2 less_low = __hmul2(low, twice(-4.f / 16777216.f)),
                  less_high = __hmul2(high, twice(-16.f / 16777216.f));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = as<uint32_t>(__hfma2(as<__half2>(a[i]), i % 2 == 0 ? low : high, i % 2 == 0 ? less_low : less_high));
    }
    multiply(c, a, b.x, b.y);
  }

  static __device__ __forceinline__ void product(float (&sum)[4], const uint8_t* block, const X& x, int) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint32_t low[4], high[4];
    unpack_scales(low, block + kScalesAt + g * 12);
    unpack_scales(high, block + kScalesAt + 96 + g * 12);
    const uint4 third = words_at(block + kBitsAt + lane * 16);
    const uint32_t bits[4] = {third.x, third.y, third.z, third.w};
    float c[4] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 four = words_at(block + (32 * i + lane) * 16);
      const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int j = 0; j < 8; ++j) {  // 16 columns
        const int run = 8 * i + j;
        const __half2 scales[2] = {scale_of_byte<5, 32>(low[run / 4], run % 4),
                                   scale_of_byte<3, 32>(high[run / 4], run % 4)};
        const uint2 b = x.four(16 * run + 4 * t);
        const uint32_t of_run = bits[run / 4];
        if (j % 4 == 0) add_run<0>(c, words[j / 2], of_run, b, scales[0], scales[1]);
        if (j % 4 == 1) add_run<1>(c, words[j / 2], of_run, b, scales[0], scales[1]);
        if (j % 4 == 2) add_run<2>(c, words[j / 2], of_run, b, scales[0], scales[1]);
        if (j % 4 == 3) add_run<3>(c, words[j / 2], of_run, b, scales[0], scales[1]);
      }
    }
    const float2 d = pair_at(block + kDAt);
    add_scaled(sum, c, {d.x / kOperandUnit, d.y / kOperandUnit});
  }

  static __device__ __forceinline__ void weights(float (&w)[2][8], const uint8_t* block, uint32_t run) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4;
    const uint32_t word = word_at(block + (run / 4 * 32 + lane) * 16 + run % 4 * 4);
    const uint32_t bits = word_at(block + kBitsAt + lane * 16 + run / 2 * 4);
    uint32_t a[2][4], low[4], high[4];
    spread_pairs<0>(a[0], word);
    spread_pairs<1>(a[1], word);
    if (run % 2 == 0) {
      add_third_bits<0>(a[0], bits), add_third_bits<1>(a[1], bits);
    } else {
      add_third_bits<2>(a[0], bits), add_third_bits<3>(a[1], bits);
    }
    unpack_scales(low, block + kScalesAt + g * 12);
    unpack_scales(high, block + kScalesAt + 96 + g * 12);
    const float2 d = pair_at(block + kDAt);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int2 q = codes_of<2>(a, i);
      const int at = int(2 * run) + i / 4;
      const float of_low = __fmul_rn(d.x, float(int(low[at / 4] >> (8 * (at % 4)) & 63u) - 32));
      const float of_high = __fmul_rn(d.y, float(int(high[at / 4] >> (8 * (at % 4)) & 63u) - 32));
      w[0][i] = __fmul_rn(of_low, float(q.x - 4)), w[1][i] = __fmul_rn(of_high, float(q.y - 4));
    }
  }
};

}  // namespace localq::gguf
