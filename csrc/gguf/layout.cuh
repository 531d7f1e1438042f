// Storage of GGUF blocks as kernels see it: the tiled order, and how codes become operands of tensor cores.
//
// The tiled order has the bytes of a file in the order in which kernels read them; it is made at load
// (localq/formats/gguf/tiles.py) and can be undone. out is a multiple of 16. A tile is 16 rows; a tile block is the
// blocks of its rows at one place, 16 times the bytes of a block. In a tile block codes come first, then further bits
// of codes, then scales and minimums. Lane = 4 g + t of a warp holds rows g and g + 8, and of every 32 columns
//   straight   8 t ... 8 t + 7: words 0 and 1, of four columns each
//   split      4 t ... 4 t + 3 and 16 + 4 t ... 16 + 4 t + 3, for scales of 16 columns: words 0 and 1
// A word is one operand A of m16n8k16, whose halves are columns c and c + 1 of a row, c the word's first column:
//   a0 row g, c, c + 1 | a1 row g + 8, c, c + 1 | a2 row g, c + 2, c + 3 | a3 row g + 8, c + 2, c + 3
//
//   nibbles    8 codes of 4 bits, lowest first: row g, c | row g + 8, c | row g, c + 2 | row g + 8, c + 2 | the same of
//              c + 1 and c + 3. So a0 and a1 are masks of the word, a2 and a3 masks of the word >> 8.
//   pairs      codes of 2 bits of 32 columns: the lower half of a word has columns c, the upper half columns c + 1;
//              in each, 8 bits for the first 16 columns and 8 for the others: a0, a1, a2, a3, lowest first
//   bits       further bits of codes, again in both halves of a word: see add_fifth_bits, add_sixth_bits,
//              add_third_bits
//   bytes      4 codes of 8 bits of row g, then of row g + 8, columns in order
//
// A code masked in place is a subnormal f16: q * 2^-24, and for rows g + 8 as many times more as its bits lie higher.
//
// type    columns  tile block: sections
// Q4_0    32       nibbles [32 lanes][2 words], d [8] of rows g and g + 8
// Q4_1    32       nibbles, d, m
// Q5_0    32       nibbles, fifth bits [32 lanes] u16, d
// Q5_1    32       nibbles, fifth bits, d, m
// Q8_0    32       bytes + 128 [32 lanes][4 words], d
// IQ4_NL  32       4 bits in the order of bytes [32 lanes][2 words], d
// Q2_K    256      pairs, split [2][32 lanes][4 words], scales [16 rows][16], d and dmin [16 rows]
// Q3_K    256      pairs, split [2][32 lanes][4 words], third bits [32 lanes][4 words], scales [16 rows][12], d [8]
// Q4_K    256      nibbles [4][32 lanes][4 words], header [16 rows][16]: d, dmin, scales and minimums as in the file
// Q5_K    256      nibbles, fifth bits [32 lanes][4 words], header
// Q6_K    256      nibbles, split [4][32 lanes][4 words], two further bits [2][32 lanes][4 words], scales + 128
//                  [16 rows][16], d [8]
// IQ4_XS  256      4 bits in the order of bytes [4][32 lanes][4 words], header [16 rows][8]
// NVFP4   64       E2M1 [32 lanes][4 words]: word i has columns c = 16 t + 4 i, of row g in lower and of row g + 8 in
//                  upper nibbles, in the order c, c + 2, c + 1, c + 3; scales [8 g][4 t][rows g, g + 8]
// IQ2_XXS 256      codes of 8 columns [32 lanes][8 runs of 32 columns][2 rows], signs and a scale [8 runs][8][2 rows]
//                  u32, d
// IQ2_XS  256      codes and signs of 8 columns [2][32 lanes][4 runs][2 rows] u16, scales [16 rows][8], d
// IQ2_S   256      codes of 8 columns as in IQ2_XXS, their bits 8 and 9 [8 runs][8][2 rows], signs [32 lanes][8 runs][2
//                  rows], scales [16 rows][8], d
// IQ3_XXS 256      codes of 4 columns [2][32 lanes][4 runs][2 rows][2], signs and a scale as in IQ2_XXS, d
// IQ3_S   256      codes as in IQ3_XXS, their bits 8 [8 runs][8][2 rows], signs [32 lanes][8 runs][2 rows], scales
//                  [16 rows][4], d
// IQ1_S   256      codes of 8 columns as in IQ2_XXS, 16 bits of each run [8 runs][8][2 rows], d
// IQ1_M   256      the same without d, header [16 rows][8]
// TQ1_0   256      digits of 160 columns [32 lanes][2][2 rows] u32, of 80 [32 lanes][2 rows] u32, of 16 [8][2 rows]
// u32,
//                  bytes of columns c, c + 2, c + 1, c + 3 in a word, split; d
// TQ2_0   256      pairs, split [2][32 lanes][4 words], d
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace localq::gguf {

constexpr uint32_t kLowNibbles = 0x000f000fu, kHighNibbles = 0x00f000f0u;
constexpr uint32_t kMagic = 0x64646464u;  // upper byte of f16 numbers 1024 + byte

// Whether matrices of a block type have a factor in addition to what their blocks hold.
template <class Block, typename = void>
constexpr bool kHasFactor = false;
template <class Block>
constexpr bool kHasFactor<Block, std::void_t<decltype(Block::kHasFactor)>> = Block::kHasFactor;

// The bits of `from` as another type.
template <typename To, typename From>
__device__ __forceinline__ To as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// Two equal halves.
__device__ __forceinline__ __half2 twice(float value) {
  return __float2half2_rn(value);
}

// `from` moved so that bit `at` becomes bit `to`.
template <int kAt, int kTo>
__device__ __forceinline__ uint32_t moved(uint32_t from) {
  if constexpr (kAt <= kTo) {
    return from << (kTo - kAt);
  } else {
    return from >> (kAt - kTo);
  }
}

// A word of nibbles as the operand A: q * 2^-24, and q * 2^-20 for rows g + 8.
__device__ __forceinline__ void spread_nibbles(uint32_t (&a)[4], uint32_t word) {
  a[0] = word & kLowNibbles;
  a[1] = word & kHighNibbles;
  word >>= 8;
  a[2] = word & kLowNibbles;
  a[3] = word & kHighNibbles;
}

// Sets bits 4 of the codes from word `kWord` (0 to 3) of those whose bits share `bits`.
template <int kWord>
__device__ __forceinline__ void add_fifth_bits(uint32_t (&a)[4], uint32_t bits) {
  constexpr int kFirst = 2 * kWord % 4 + 8 * (kWord / 2);
  const uint32_t near = moved<kFirst, 4>(bits), far = moved<kFirst + 1, 4>(bits);
  a[0] |= near & 0x00100010u;
  a[1] |= near & 0x01000100u;
  a[2] |= far & 0x00100010u;
  a[3] |= far & 0x01000100u;
}

// Sets bits 4 and 5 of the codes, from word `kWord` (0 or 1) of those whose bits share `bits`.
template <int kWord>
__device__ __forceinline__ void add_sixth_bits(uint32_t (&a)[4], uint32_t bits) {
  const uint32_t near = moved<8 * kWord, 4>(bits), far = moved<8 * kWord + 2, 4>(bits);
  a[0] |= near & 0x00300030u;
  a[1] |= near & 0x03000300u;
  a[2] |= far & 0x00300030u;
  a[3] |= far & 0x03000300u;
}

// 16 columns (`kWord` 0 or 1) of a word of pairs as the operand A: q * 2^-24, and q * 2^-22 for rows g + 8.
template <int kWord>
__device__ __forceinline__ void spread_pairs(uint32_t (&a)[4], uint32_t word) {
  const uint32_t near = word >> (8 * kWord), far = word >> (8 * kWord + 4);
  a[0] = near & 0x00030003u;
  a[1] = near & 0x000c000cu;
  a[2] = far & 0x00030003u;
  a[3] = far & 0x000c000cu;
}

// Sets bits 2 of codes of two bits, from word `kWord` (0 to 3) of those whose bits share `bits`.
template <int kWord>
__device__ __forceinline__ void add_third_bits(uint32_t (&a)[4], uint32_t bits) {
  const uint32_t near = moved<4 * kWord, 2>(bits), far = moved<4 * kWord + 1, 2>(bits);
  a[0] |= near & 0x00040004u;
  a[1] |= near & 0x00100010u;
  a[2] |= far & 0x00040004u;
  a[3] |= far & 0x00100010u;
}

// Four bytes (code + 128) of a row as halves: exact.
__device__ __forceinline__ void spread_bytes(uint32_t& near, uint32_t& far, uint32_t bytes) {
  const __half2 less = twice(-1152.f);
  near = as<uint32_t>(__hadd2(as<__half2>(__byte_perm(bytes, kMagic, 0x4140)), less));
  far = as<uint32_t>(__hadd2(as<__half2>(__byte_perm(bytes, kMagic, 0x4342)), less));
}

// Multiplies operands of codes by the scales of rows g and g + 8.
__device__ __forceinline__ void scale_codes(uint32_t (&a)[4], __half2 low, __half2 high) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = as<uint32_t>(__hmul2(as<__half2>(a[i]), i % 2 == 0 ? low : high));
}

// Codes of rows g and g + 8 in column `i` of the eight of words 0 and 1; those of rows g + 8 lie kUp bits higher.
template <int kUp>
__device__ __forceinline__ int2 codes_of(const uint32_t (&a)[2][4], int i) {
  const uint32_t (&four)[4] = a[i / 4];
  const int pair = i % 4 / 2 * 2, shift = 16 * (i % 2);
  return {int(four[pair] >> shift & 0xffffu), int(four[pair + 1] >> shift & 0xffffu) >> kUp};
}

// Byte `k` of `bytes` in both halves: 1024 + byte.
__device__ __forceinline__ __half2 spread_byte(uint32_t bytes, int k) {
  return as<__half2>(__byte_perm(bytes, kMagic, 0x4040u | uint32_t(k) << 8 | uint32_t(k)));
}

// Byte `k` of `bytes` as f32.
__device__ __forceinline__ float byte_to_float(uint32_t bytes, int k) {
  return as<float>(__byte_perm(bytes, 0x4b000000u, 0x7440u | uint32_t(k))) - 8388608.f;
}

// The halves of a word: the values of rows g and g + 8.
__device__ __forceinline__ float2 both_rows(uint32_t pair) {
  return __half22float2(as<__half2>(pair));
}

// A word at a multiple of 4 or of 16 bytes.
__device__ __forceinline__ uint32_t word_at(const uint8_t* from) {
  return *reinterpret_cast<const uint32_t*>(from);
}
__device__ __forceinline__ uint4 words_at(const uint8_t* from) {
  return *reinterpret_cast<const uint4*>(from);
}

}  // namespace localq::gguf
