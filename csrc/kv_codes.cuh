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

// One element per lane, turned among runs of `width` lanes; symmetric, so it also turns back.
__device__ __forceinline__ float turned(float x, int width, int lane) {
  for (int step = 1; step < width; step *= 2) {
    const float other = __shfl_xor_sync(~0u, x, step);
    x = lane & step ? other - x : x + other;
  }
  return x * hadamard_scale(width);
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

// The code of a block's element x (turned, one per lane, zero past the end). NaN or infinity in the block makes its
// scale NaN or infinite, so that all that is read from it is NaN.
__device__ __forceinline__ Code encode(float x, int bits) {
  const float largest = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(fabsf(x))));
  Code best;
  best.scale = 0.f, best.code = 0, best.value = 0.f;
  if (bits == 8) {
    best.scale = __half2float(__float2half_rn(__fdiv_rn(largest, 127.f)));
    const float inverse = best.scale > 0.f ? __frcp_rn(best.scale) : 0.f;
    best.code = min(127, max(-127, __float2int_rn(x * inverse)));
    best.value = best.scale * best.code;
    return best;
  }
  // Clipping the largest pays where it stands out: the best of six ranges by squared error, the first of equals.
  float least = 0.f;
#pragma unroll
  for (int option = 0; option < 6; ++option) {
    const float scale = __half2float(__float2half_rn(__fdiv_rn(largest, 13.f + option)));
    const float inverse = scale > 0.f ? __frcp_rn(scale) : 0.f;
    const int code = min(15, max(0, __float2int_rn(fmaf(x * inverse, 0.5f, 7.5f))));
    const float value = scale * (2 * code - 15);
    const float error = warp_sum((value - x) * (value - x));
    if (option == 0 || error < least) {
      least = error;
      best.scale = scale, best.code = code, best.value = value;
    }
  }
  return best;
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
