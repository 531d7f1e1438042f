// The stored form of keys and values in 8 and 4 bit, as localq/quant/kv_codec.py defines it.
//
// A vector is cut into blocks of 32 elements; the last may be shorter. Each block is turned by a Hadamard matrix over
// runs of w = 32, 16 or 8 elements (the largest that divides head_dim): outliers of single channels spread, and q k^T
// does not change when q is turned as well. Then a block has one f16 scale s and
//   8 bit  byte = code + 128, code in -127..127, value = s * code
//   4 bit  code in 0..15, value = s * (2 code - 15); of 8 neighbours in one u32, elements 2i lie at bit 4i and
//          elements 2i + 1 at bit 16 + 4i, so that one mask makes a pair of halves of two neighbours
// A vector has 2 (head_dim <= 64), 4 (<= 128) or 8 scales, those of the even blocks before those of the odd ones: the
// lanes that read values of the even blocks need no others.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace localq {

constexpr int kKvBlock = 32;

__host__ __device__ inline int hadamard_width(int head_dim) {
  return head_dim % 32 == 0 ? 32 : head_dim % 16 == 0 ? 16 : 8;
}

__host__ __device__ inline int scales_of(int head_dim) {
  return head_dim <= 64 ? 2 : head_dim <= 128 ? 4 : 8;
}

// Where the scale of `block` lies among the `scales` of a vector.
__host__ __device__ constexpr int scale_place(int block, int scales) {
  return block % 2 * (scales / 2) + block / 2;
}

__device__ __forceinline__ float hadamard_scale(int width) {  // width ** -0.5
  return width == 32 ? 0.17677669529663687f : width == 16 ? 0.25f : 0.35355339059327373f;
}

// One element of each block per lane, turned among runs of `width` lanes; symmetric, so it also turns back.
template <int kCount>
__device__ __forceinline__ void turn(float (&x)[kCount], int width, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    if (step >= width) break;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float other = __shfl_xor_sync(~0u, x[i], step);
      x[i] = lane & step ? other - x[i] : x[i] + other;
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] *= hadamard_scale(width);
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

struct Code {
  float scale;  // what was rounded to f16
  int code;     // 8 bit: -127..127; 4 bit: 0..15
  float value;  // as it will be read
};

// Of eight sums over the warp, the index of the least, the first of equals; NaN is above all. The sums are made in the
// order of warp_sum, but of eight at a time: each step halves how many a lane still has.
__device__ __forceinline__ int first_least(float (&part)[8], int lane) {
#pragma unroll
  for (int half = 4; half > 0; half /= 2) {
    const int step = 4 * half;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float low = part[i], high = part[half + i];  // by value: a choice of addresses would go through memory
      const float keep = lane & step ? high : low, give = lane & step ? low : high;
      part[i] = keep + __shfl_xor_sync(~0u, give, step);
    }
  }
  part[0] += __shfl_xor_sync(~0u, part[0], 2);
  part[0] += __shfl_xor_sync(~0u, part[0], 1);
  const unsigned order = __float_as_uint(part[0]);  // of sums that are not negative, that of the bits
  return (__ffs(__ballot_sync(~0u, order == __reduce_min_sync(~0u, order))) - 1) / 4;
}

__device__ __forceinline__ float inverse_of(float scale) {
  return scale > 0.f ? __frcp_rn(scale) : 0.f;
}

__device__ __forceinline__ Code code_4_bit(float x, float scale, float inverse) {
  const int code = min(15, max(0, __float2int_rn(fmaf(x * inverse, 0.5f, 7.5f))));
  return {scale, code, __fmul_rn(scale, float(2 * code - 15))};
}

// Clipping the largest pays where it stands out: the best of six ranges by squared error, the first of equals.
template <int kCount>
__device__ __forceinline__ void encode_4_bit(Code (&code)[kCount], const float (&x)[kCount],
                                             const float (&largest)[kCount], int lane) {
  constexpr float kNone = __builtin_nanf("");
  constexpr int kGroup = kCount < 4 ? kCount : 4;
  static_assert(kCount % kGroup == 0);
#pragma unroll
  for (int first = 0; first < kCount; first += 4) {  // lane 8 b + option has the scale of block `first` + b
    float top = largest[first];
#pragma unroll
    for (int b = 1; b < kGroup; ++b) {
      const float other = largest[first + b];
      top = lane / 8 == b ? other : top;
    }
    const float scale = __half2float(__float2half_rn(__fdiv_rn(top, float(13 + lane % 8))));
    const float inverse = inverse_of(scale);
#pragma unroll
    for (int b = 0; b < kGroup; ++b) {
      float error[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, kNone, kNone};
#pragma unroll
      for (int option = 0; option < 6; ++option) {
        const float s = __shfl_sync(~0u, scale, 8 * b + option), i = __shfl_sync(~0u, inverse, 8 * b + option);
        const float off = __fsub_rn(code_4_bit(x[first + b], s, i).value, x[first + b]);
        error[option] = __fmul_rn(off, off);
      }
      const int best = 8 * b + first_least(error, lane);
      code[first + b] = code_4_bit(x[first + b], __shfl_sync(~0u, scale, best), __shfl_sync(~0u, inverse, best));
    }
  }
}

// The codes of the blocks' elements x (turned, one of each block per lane, zero past the end). NaN or infinity in a
// block makes its scale NaN or infinite, so that all that is read from it is NaN.
template <int kCount>
__device__ __forceinline__ void encode(Code (&code)[kCount], const float (&x)[kCount], int bits, int lane) {
  float largest[kCount];
#pragma unroll
  for (int b = 0; b < kCount; ++b) {
    largest[b] = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(fabsf(x[b]))));
  }
  if (bits == 4) return encode_4_bit(code, x, largest, lane);
#pragma unroll
  for (int b = 0; b < kCount; ++b) {
    const float scale = __half2float(__float2half_rn(__fdiv_rn(largest[b], 127.f)));
    const int near = min(127, max(-127, __float2int_rn(x[b] * inverse_of(scale))));
    code[b] = {scale, near, scale * near};
  }
}

// Stores the codes of a block, one per lane: `lane` < `count` elements of the vector that starts at `codes`, from
// element `first` on. All lanes must call.
__device__ __forceinline__ void store_codes(uint8_t* codes, int first, int lane, int count, int code, int bits) {
  if (bits == 8) {
    if (lane < count) codes[first + lane] = uint8_t(code + 128);
    return;
  }
  unsigned word = unsigned(code) << (4 * ((lane & 7) >> 1) + 16 * (lane & 1));
#pragma unroll
  for (int step = 1; step < 8; step *= 2) word |= __shfl_xor_sync(~0u, word, step);
  if (lane < count && lane % 8 == 0) *reinterpret_cast<unsigned*>(codes + (first + lane) / 2) = word;
}

// Eight codes as pairs of halves, before the scale: 8 bit from two words, 4 bit from one.
struct Pairs {
  unsigned pair[4];
};
__device__ __forceinline__ unsigned less(unsigned pair, unsigned short half_bits) {
  const __half2 from = *reinterpret_cast<const __half2*>(&pair);
  const __half2 difference = __hsub2(from, __half2half2(__ushort_as_half(half_bits)));
  return *reinterpret_cast<const unsigned*>(&difference);
}
__device__ __forceinline__ Pairs decode_pairs(uint2 codes) {
  // A byte under the exponent of 1024 is 1024 + byte; 0x6480 is 1152.
  return {
      less(__byte_perm(codes.x, 0x64646464, 0x4140), 0x6480), less(__byte_perm(codes.x, 0x64646464, 0x4342), 0x6480),
      less(__byte_perm(codes.y, 0x64646464, 0x4140), 0x6480), less(__byte_perm(codes.y, 0x64646464, 0x4342), 0x6480)};
}
__device__ __forceinline__ Pairs decode_pairs(unsigned codes) {
  // A nibble one bit up under the exponent of 1024 is 1024 + 2 code; 0x640F is 1039.
  constexpr unsigned kMask = 0x001E001Eu, kMagic = 0x64006400u;
  return {less((codes << 1 & kMask) | kMagic, 0x640F), less((codes >> 3 & kMask) | kMagic, 0x640F),
          less((codes >> 7 & kMask) | kMagic, 0x640F), less((codes >> 11 & kMask) | kMagic, 0x640F)};
}

}  // namespace localq
