// What codes and scales are, a struct for each kind: product of an item, weights of 32 columns.
//
// kColumns, kBytes, kScaleBytes, kZeroBytes   of a tile block: columns, codes, scales, zero points
// kItemBlocks   tile blocks of an item; in shared memory scales come behind all codes, zero points behind all scales
// kUnit         sums of `product` are to be multiplied by it, and by the factor of the matrix
// kGrouped      x lies in shared memory in the order of `Order`: lanes of nibbles have groups of 16 columns
#pragma once

#include "scaled/layout.cuh"

namespace localq::scaled {

// The factor of a matrix for rows g and g + 8.
struct Factors {
  float2 value;
  bool divides;
};

// Where words of eight columns of x go.
template <bool kGrouped>
struct Order {
  __device__ __forceinline__ uint32_t operator()(uint32_t word) const {
    return kGrouped ? (word & ~7u) | (word & 1u) << 2 | (word >> 1 & 3u) : word;
  }
};

// The operands A of words 0 and 1 of 32 columns in bytes. Bytes::spread(near, far, word, upper) makes those of a row.
template <class Bytes>
__device__ __forceinline__ void spread_32(uint32_t (&a)[2][4], const Bytes& codes, const uint8_t* from) {
  const uint4 words = words_at(from + threadIdx.x % 32 * 16);
  codes.spread(a[0][0], a[0][2], words.x, false);
  codes.spread(a[0][1], a[0][3], words.y, true);
  codes.spread(a[1][0], a[1][2], words.z, false);
  codes.spread(a[1][1], a[1][3], words.w, true);
}

// c += 32 columns in bytes times x from `column` on.
template <class Bytes>
__device__ __forceinline__ void multiply_32(float (&c)[4], const Bytes& codes, const uint8_t* from, const X& x,
                                            uint32_t column) {
  uint32_t a[2][4];
  spread_32(a, codes, from);
  const uint4 b = x.eight(column + 8 * (threadIdx.x % 4));
  gguf::multiply(c, a[0], b.x, b.y);
  gguf::multiply(c, a[1], b.z, b.w);
}

// w = scale * unit * value, of operands that hold the values in units; `unit` is a power of two.
__device__ __forceinline__ void scale_values(float (&w)[2][8], const uint32_t (&a)[2][4], float unit, float2 scale) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 low = scaled_halves(a[i / 2][i % 2 * 2], unit), high = scaled_halves(a[i / 2][i % 2 * 2 + 1], unit);
    w[0][2 * i] = __fmul_rn(low.x, scale.x), w[0][2 * i + 1] = __fmul_rn(low.y, scale.x);
    w[1][2 * i] = __fmul_rn(high.x, scale.y), w[1][2 * i + 1] = __fmul_rn(high.y, scale.y);
  }
}

// The scale of a group of 16 columns is folded into its weights: E2M1 times e4m3 times 2^-7 is exact in f16, so sums
// run through the whole item.
struct Nvfp4 {
  static constexpr int kColumns = 64, kItemBlocks = 4, kBytes = 512, kScaleBytes = 64, kZeroBytes = 0;
  static constexpr bool kGrouped = true;
  static constexpr float kUnit = 128.f;

  // Scales of the lane's group, times 2^-8, of rows g and g + 8, in both halves.
  static __device__ __forceinline__ void scales(uint32_t (&pair)[2], const uint8_t* at, uint32_t lane) {
    const uint32_t bytes = reinterpret_cast<const uint16_t*>(at)[lane];
    pair[0] = e4m3_halves(__byte_perm(bytes, 0u, 0x0404));
    pair[1] = e4m3_halves(__byte_perm(bytes, 0u, 0x1414));
  }

  static __device__ __forceinline__ void product(float (&sum)[4], const uint8_t* item, const X& x, int blocks) {
    const uint32_t lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
    for (int i = 0; i < kItemBlocks; ++i) {
      if (i >= blocks) break;
      const uint4 words = words_at(item + i * kBytes + lane * 16);
      const uint4 b[2] = {x.eight(64 * i + 8 * t), x.eight(64 * i + 32 + 8 * t)};
      uint32_t pair[2];
      scales(pair, item + kItemBlocks * kBytes + i * kScaleBytes, lane);
      const __half2 up = twice(32768.f);
      const __half2 scale[2] = {__hmul2(as<__half2>(pair[0]), up), __hmul2(as<__half2>(pair[1]), up)};
      const uint32_t codes[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        uint32_t a[4];
        spread_e2m1(a, codes[k]);
#pragma unroll
        for (int j = 0; j < 4; ++j) a[j] = as<uint32_t>(__hmul2(as<__half2>(a[j]), scale[j % 2]));
        const uint4& eight = b[k / 2];
        gguf::multiply(sum, a, k % 2 == 0 ? eight.x : eight.z, k % 2 == 0 ? eight.y : eight.w);
      }
    }
  }

  // The scale of a group: that of the file times, or divided by, the factor.
  static __device__ __forceinline__ float scale_of(uint32_t pair, float factor, bool divides) {
    const float scale = both_rows(pair).x * 256.f;
    return divides ? scale / factor : __fmul_rn(scale, factor);
  }

  static __device__ __forceinline__ void weights(float (&w)[2][8], const uint8_t* codes, const uint8_t* scale,
                                                 const uint8_t*, uint32_t run, const Factors& factors) {
    const uint32_t lane = threadIdx.x % 32, t = lane % 4, owner = lane - t + 2 * run + t / 2;
    const uint2 words = *reinterpret_cast<const uint2*>(codes + owner * 16 + t % 2 * 8);
    uint32_t pair[2], a[2][4];
    scales(pair, scale, owner);
    spread_e2m1(a[0], words.x);
    spread_e2m1(a[1], words.y);
    scale_values(
        w, a, 16384.f,
        {scale_of(pair[0], factors.value.x, factors.divides), scale_of(pair[1], factors.value.y, factors.divides)});
  }
};

struct E4m3 {
  __device__ __forceinline__ void spread(uint32_t& near, uint32_t& far, uint32_t word, bool) const {
    spread_e4m3(near, far, word);
  }
};

template <bool kBlocks>
struct Fp8 {
  static constexpr int kColumns = 64, kItemBlocks = 2, kBytes = 1024, kScaleBytes = kBlocks ? 4 : 0, kZeroBytes = 0;
  static constexpr bool kGrouped = false;
  static constexpr float kUnit = 256.f;

  static __device__ __forceinline__ void product(float (&sum)[4], const uint8_t* item, const X& x, int blocks) {
#pragma unroll
    for (int i = 0; i < kItemBlocks; ++i) {
      if (i >= blocks) break;
      const uint8_t* const codes = item + i * kBytes;
      if constexpr (kBlocks) {
        float c[4] = {};
        multiply_32(c, E4m3{}, codes, x, 64 * i);
        multiply_32(c, E4m3{}, codes + 512, x, 64 * i + 32);
        const float scale = as<float>(word_at(item + kItemBlocks * kBytes + i * kScaleBytes));
        gguf::add_scaled(sum, c, {scale, scale});
      } else {
        multiply_32(sum, E4m3{}, codes, x, 64 * i);
        multiply_32(sum, E4m3{}, codes + 512, x, 64 * i + 32);
      }
    }
  }

  static __device__ __forceinline__ void weights(float (&w)[2][8], const uint8_t* codes, const uint8_t* scale,
                                                 const uint8_t*, uint32_t run, const Factors& factors) {
    uint32_t a[2][4];
    spread_32(a, E4m3{}, codes + run * 512);
    const float of_block = kBlocks ? as<float>(word_at(scale)) : 0.f;
    scale_values(w, a, kUnit, kBlocks ? float2{of_block, of_block} : factors.value);
  }
};

// Codes less the zero points of rows g and g + 8, each in both halves with 1024.
struct Integers {
  __half2 zero[2];

  __device__ __forceinline__ void spread(uint32_t& near, uint32_t& far, uint32_t word, bool upper) const {
    spread_bytes(near, far, word, upper ? zero[1] : zero[0]);
  }
};

template <int kGroup>
struct Int8Groups {
  static constexpr int kColumns = kGroup, kItemBlocks = 128 / kGroup, kBytes = 16 * kGroup;
  static constexpr int kScaleBytes = 64, kZeroBytes = 16;
  static constexpr bool kGrouped = false;
  static constexpr float kUnit = 1.f;

  static __device__ __forceinline__ Integers integers(const uint8_t* zeros) {
    const uint32_t bytes = reinterpret_cast<const uint16_t*>(zeros)[threadIdx.x % 32 / 4];
    return {{gguf::spread_byte(bytes, 0), gguf::spread_byte(bytes, 1)}};
  }
  static __device__ __forceinline__ float2 scale_at(const uint8_t* scales) {
    return reinterpret_cast<const float2*>(scales)[threadIdx.x % 32 / 4];
  }

  static __device__ __forceinline__ void product(float (&sum)[4], const uint8_t* item, const X& x, int blocks) {
    const uint8_t* const scales = item + kItemBlocks * kBytes;
    const uint8_t* const zeros = scales + kItemBlocks * kScaleBytes;
#pragma unroll
    for (int i = 0; i < kItemBlocks; ++i) {
      if (i >= blocks) break;
      const Integers codes = integers(zeros + i * kZeroBytes);
      float c[4] = {};
#pragma unroll
      for (int run = 0; run < kGroup / 32; ++run) {
        multiply_32(c, codes, item + i * kBytes + run * 512, x, kGroup * i + 32 * run);
      }
      gguf::add_scaled(sum, c, scale_at(scales + i * kScaleBytes));
    }
  }

  static __device__ __forceinline__ void weights(float (&w)[2][8], const uint8_t* codes, const uint8_t* scale,
                                                 const uint8_t* zeros, uint32_t run, const Factors&) {
    uint32_t a[2][4];
    spread_32(a, integers(zeros), codes + run * 512);
    scale_values(w, a, 1.f, scale_at(scale));
  }
};

struct Int8Rows {
  static constexpr int kColumns = 32, kItemBlocks = 4, kBytes = 512, kScaleBytes = 0, kZeroBytes = 0;
  static constexpr bool kGrouped = false;
  static constexpr float kUnit = 1.f;

  static __device__ __forceinline__ Integers integers() {
    return {{twice(1152.f), twice(1152.f)}};
  }

  static __device__ __forceinline__ void product(float (&sum)[4], const uint8_t* item, const X& x, int blocks) {
#pragma unroll
    for (int i = 0; i < kItemBlocks; ++i) {
      if (i >= blocks) break;
      multiply_32(sum, integers(), item + i * kBytes, x, 32 * i);
    }
  }

  static __device__ __forceinline__ void weights(float (&w)[2][8], const uint8_t* codes, const uint8_t*, const uint8_t*,
                                                 uint32_t, const Factors& factors) {
    uint32_t a[2][4];
    spread_32(a, integers(), codes);
    scale_values(w, a, 1.f, factors.value);
  }
};

}  // namespace localq::scaled
