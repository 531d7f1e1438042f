// gemv.cuh: what 16 bytes of a row are, in MXFP4, NF4 and 16 bit.
//
// A format has: kSteps loads of a row in an item, kXWords 16-byte words of x to 16 bytes of W, kScaleBytes of a row's
// scales to a step, kTableBytes of shared memory, and kHalfX, x in f16 and in pairs of columns c and c + 4 whatever T
// is.
#pragma once

#include "experts/gemv.cuh"
#include "nf4/layout.cuh"
#include "nf4/mma.cuh"

namespace localq {

// E2M1 by bit operations: sign and three bits of a code in a byte, as sign, exponent and mantissa of the upper byte of
// an f16. Its exponent is 14 less biased than E2M1's, so that is the value times 2^-14, the subnormal 0.5 included.
// Products with f16 are exact, the scales are applied to their sums in f32.
template <typename T, int kRing = 3>
struct Mxfp4Blocks {
  static constexpr int kSteps = kRing, kXWords = 4, kScaleBytes = 4, kTableBytes = 0;
  static constexpr bool kHalfX = true;
  static constexpr float kSumScale = 16384.f;
  using Scale = uint32_t;  // two bytes

  static __device__ __forceinline__ void fill(uint8_t*, const BlockGemv&) {
  }
  static __device__ __forceinline__ const uint8_t* scales(const BlockGemv& p, const uint8_t* all, uint32_t row,
                                                          uint32_t second) {
    return all + uint64_t(row) * (p.in / 32) + 2 * second;
  }
  static __device__ __forceinline__ Scale load_scale(const BlockGemv&, const uint8_t* at, int left, int needed) {
    return load_scale_16(at, left, needed);
  }

  // Columns (0, 4), (1, 5), (2, 6), (3, 7) of the eight of a word.
  static __device__ __forceinline__ void decode(uint32_t (&pairs)[4], uint32_t word) {
    const uint32_t even = (word << 1 & 0x0e0e0e0eu) | (word << 4 & 0x80808080u);
    const uint32_t odd = (word >> 3 & 0x0e0e0e0eu) | (word & 0x80808080u);
    pairs[0] = __byte_perm(even, 0, 0x2404), pairs[1] = __byte_perm(odd, 0, 0x2404);
    pairs[2] = even & 0xff00ff00u, pairs[3] = odd & 0xff00ff00u;
  }

  static __device__ __forceinline__ void multiply(float (&c)[4], const uint8_t*, uint4 low, uint4 high,
                                                  const uint4 (&x)[kXWords]) {
    const uint32_t lows[4] = {low.x, low.y, low.z, low.w}, highs[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t l[4], h[4];
      decode(l, lows[i]);
      decode(h, highs[i]);
      mma(c, {l[0], h[0], l[1], h[1]}, x[i].x, x[i].y, __half{});
      mma(c, {l[2], h[2], l[3], h[3]}, x[i].z, x[i].w, __half{});
    }
  }

  // 2 ^ (byte - 127), of byte 0 the subnormal that it is.
  static __device__ __forceinline__ float power(uint32_t shifted) {
    return __uint_as_float(max(shifted & 0x7f800000u, 0x00400000u));
  }
  static __device__ __forceinline__ float add(const BlockGemv&, const uint8_t*, float sum, float2 own, Scale scale) {
    return fmaf(own.y, power(scale << 15), fmaf(own.x, power(scale << 23), sum));
  }
};

// Codes by the look-up table of nf4/mma.cuh. A block of 64 columns is what two lanes load.
template <typename T, bool kNested>
struct Nf4Blocks {
  static constexpr int kSteps = 2, kXWords = 4, kScaleBytes = kNested ? 2 : 8, kTableBytes = localq::kTableBytes;
  static constexpr bool kHalfX = false;
  static constexpr float kSumScale = 1.f / kTableScale<T>;
  using Scale = StoredAbsmax;

  static __device__ __forceinline__ void fill(uint8_t* table, const BlockGemv& p) {
    fill_table<T>(table, p.code_map, p.nested_map);
  }
  static __device__ __forceinline__ const uint8_t* scales(const BlockGemv& p, const uint8_t* all, uint32_t row,
                                                          uint32_t second) {
    return all + (uint64_t(row) * (p.in / kBlock) + second) * (kNested ? 1 : 4);
  }
  static __device__ __forceinline__ Scale load_scale(const BlockGemv& p, const uint8_t* at, int left, int needed) {
    if constexpr (kNested) {
      const uint64_t nested = uint64_t(at - p.matrix[0].scales) / kNestedBlock;
      return {load_scale_f32(p.nested_absmax + nested, left, needed), load_scale_8(at, left, needed)};
    } else {
      return {load_scale_f32(at, left, needed), 0u};
    }
  }
  static __device__ __forceinline__ void multiply(float (&c)[4], const uint8_t* table, uint4 low, uint4 high,
                                                  const uint4 (&x)[kXWords]) {
    const uint32_t lane_offset = 4 * (threadIdx.x % 32);
    multiply_block<T>(c, table, lane_offset, make_uint4(low.x, low.y, high.x, high.y),
                      {x[0].x, x[0].y, x[0].z, x[0].w, x[1].x, x[1].y, x[1].z, x[1].w});
    multiply_block<T>(c, table, lane_offset, make_uint4(low.z, low.w, high.z, high.w),
                      {x[2].x, x[2].y, x[2].z, x[2].w, x[3].x, x[3].y, x[3].z, x[3].w});
  }
  static __device__ __forceinline__ float add(const BlockGemv& p, const uint8_t* table, float sum, float2 own,
                                              Scale scale) {
    float absmax = scale.scale;
    if constexpr (kNested) {
      const float code = __uint_as_float(look_up(table, 128 + 4 * (threadIdx.x % 32), scale.code, 0));
      absmax = __fadd_rn(__fmul_rn(code, scale.scale), p.offset);
    }
    return fmaf(own.x + own.y, absmax, sum);
  }
};

template <typename T>
struct PlainBlocks {
  static constexpr int kSteps = 4, kXWords = 1, kScaleBytes = 0, kTableBytes = 0;
  static constexpr bool kHalfX = false;
  static constexpr float kSumScale = 1.f;
  struct Scale {};

  static __device__ __forceinline__ void fill(uint8_t*, const BlockGemv&) {
  }
  static __device__ __forceinline__ const uint8_t* scales(const BlockGemv&, const uint8_t*, uint32_t, uint32_t) {
    return nullptr;
  }
  static __device__ __forceinline__ Scale load_scale(const BlockGemv&, const uint8_t*, int, int) {
    return {};
  }
  static __device__ __forceinline__ void multiply(float (&c)[4], const uint8_t*, uint4 low, uint4 high,
                                                  const uint4 (&x)[kXWords]) {
    mma(c, {low.x, high.x, low.y, high.y}, x[0].x, x[0].y, T{});
    mma(c, {low.z, high.z, low.w, high.w}, x[0].z, x[0].w, T{});
  }
  static __device__ __forceinline__ float add(const BlockGemv&, const uint8_t*, float sum, float2 own, Scale) {
    return sum + own.x + own.y;
  }
};

}  // namespace localq
