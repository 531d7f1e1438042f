// NF4 codes as operands of tensor core products: the look-up table in shared memory, and m16n8k16.
//
// A row of the table is 256 bytes, so that one PRMT makes an address: byte 1 is the code byte, byte 0 the lane's own
// column of it. Every lane has its own copy of every entry, so no two lanes of a warp ever meet in a bank:
//   row e, word l       the two weights of code byte e in type T, low half = even column, for lane l
//   row e, word 32 + l  f32: what absmax code e stands for, for lane l
#pragma once

#include <cstdint>

#include "common/mma.cuh"
#include "nf4/nf4.h"

namespace localq {

constexpr int kTableBytes = 256 * 256;
constexpr int kTogether = 2;  // products whose look-ups are in flight at a time

// The table holds the 16 values times this, and every sum is divided by it: where a value falls between two numbers of
// type T is chance, and with this factor (the best of 2^23 between 1 and 2) the worst is rounded by half as much.
template <typename T>
__device__ constexpr float kTableScale = 0.f;
template <>
__device__ constexpr float kTableScale<__half> = 1.6384992599487305f;  // worst relative error 1.6e-4, 3.3e-4 without
template <>
__device__ constexpr float kTableScale<__nv_bfloat16> = 1.1888107061386108f;  // 1.6e-3, 3.1e-3 without

// Fills the table with all threads of the block; they must synchronise before the first look-up. Reads only weights.
template <typename T>
__device__ __forceinline__ void fill_table(uint8_t* table, const float* code_map, const float* nested_map) {
  const int column = threadIdx.x % 16;  // 16 bytes of a row each: eight threads for the pairs, eight for the absmax
#pragma unroll 4
  for (int row = threadIdx.x / 16; row < 256; row += blockDim.x / 16) {
    uint32_t word = 0;
    if (column < 8) {
      word = pack(code_map[row >> 4] * kTableScale<T>, code_map[row & 15] * kTableScale<T>, T{});
    } else if (nested_map != nullptr) {
      word = __float_as_uint(nested_map[row]);
    }
    reinterpret_cast<uint4*>(table)[row * 16 + column] = make_uint4(word, word, word, word);
  }
}

// Entry of byte k of `word`; `lane_offset` is 4 * lane for weights, 128 + 4 * lane for absmax. volatile keeps the
// look-ups in their order against the products: ptxas would otherwise start those of all blocks at hand, and spill.
__device__ __forceinline__ uint32_t look_up(const uint8_t* table, uint32_t lane_offset, uint32_t word, int k) {
  const uint32_t offset = __byte_perm(word, lane_offset, 0x5504u | (uint32_t(k) << 4));
  return *reinterpret_cast<const volatile uint32_t*>(table + offset);
}

// c = 16 rows x 64 columns of W times x. The lane holds 8 bytes of row g (codes.x, .y) and of row g + 8 (.z, .w), which
// are columns 16 t .. 16 t + 15, and x of the same columns: which column an index of the product means is free as long
// as both operands agree.
template <typename T>
__device__ __forceinline__ void multiply_block(float (&c)[4], const uint8_t* table, uint32_t lane_offset, uint4 codes,
                                               const uint32_t (&x)[8]) {
  const uint32_t low[2] = {codes.x, codes.y}, high[2] = {codes.z, codes.w};
  uint32_t a[4][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int word = i / 2, byte = 2 * (i % 2);
    a[i][0] = look_up(table, lane_offset, low[word], byte), a[i][1] = look_up(table, lane_offset, high[word], byte);
    a[i][2] = look_up(table, lane_offset, low[word], byte + 1);
    a[i][3] = look_up(table, lane_offset, high[word], byte + 1);
    if (i % kTogether == kTogether - 1) {
#pragma unroll
      for (int k = i + 1 - kTogether; k <= i; ++k) mma(c, a[k], x[2 * k], x[2 * k + 1], T{});
    }
  }
}

}  // namespace localq
