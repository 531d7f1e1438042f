// Weights of gemm_kernel.cuh: how 64 columns of a row are copied to shared memory, and become the operand A of four
// products m16n8k16.
//
// Lane (g, t) of a warp holds rows g and g + 8 of a tile, and of either half of 64 columns, columns 8 t .. 8 t + 7.
// Products 0 and 1 are of the first half. A format has
//   kWarps         of a block, each with 32 rows
//   kTableBytes    of its table, which `fill` makes
//   kStageBytes    for 64 columns of the block's rows
//   kWords         16-byte words of a row there; word_at: where one is
//   kScales        scales of 64 columns of a row; 0: none. `load` asks for them, `scales` has their values
//   kSumScale      what sums are multiplied by
#pragma once

#include "common/launch.h"
#include "common/mma.cuh"
#include "common/pair_table.cuh"
#include "experts/gemm_plan.h"
#include "nf4/layout.cuh"
#include "nf4/mma.cuh"

namespace localq::grouped {

// Words of eight columns of eight rows, in an order in which reads and writes use all banks.
constexpr uint32_t kGroupWords = 68, kSecondHalf = 36;

__device__ __forceinline__ uint32_t x_word_at(uint32_t row, uint32_t word) {
  return (row / 8 * kGroupWords + word / 4 * kSecondHalf + row % 8 * 4 + word % 4) * 16;
}

// Codes of a table with 16 values; codes of a row are 32 bytes, whose halves change places in every other four rows, so
// that the lanes of a warp use all banks.
template <typename T>
struct Codes {
  static constexpr int kWarps = 8;
  static constexpr uint32_t kTableBytes = kPairTableBytes, kWords = 2, kStageBytes = kWarps * 32 * 32;

  static __device__ __forceinline__ uint32_t word_at(uint32_t row, uint32_t word) {
    return (2 * row + (word ^ (row / 4 & 1))) * 16;
  }

  static __device__ __forceinline__ void operands(uint32_t (&a)[4][4], const uint8_t* table, const uint8_t* stage,
                                                  uint32_t tile) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row = tile * 16 + g;
    const uint8_t* const of_lane = table + 4 * lane;
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t low = *reinterpret_cast<const uint32_t*>(stage + word_at(row, half) + 4 * t);
      const uint32_t high = *reinterpret_cast<const uint32_t*>(stage + word_at(row + 8, half) + 4 * t);
      uint32_t (&first)[4] = a[2 * half];
      uint32_t (&second)[4] = a[2 * half + 1];
      first[0] = pair_of_byte<0>(of_lane, low), first[1] = pair_of_byte<0>(of_lane, high);
      first[2] = pair_of_byte<1>(of_lane, low), first[3] = pair_of_byte<1>(of_lane, high);
      second[0] = pair_of_byte<2>(of_lane, low), second[1] = pair_of_byte<2>(of_lane, high);
      second[2] = pair_of_byte<3>(of_lane, low), second[3] = pair_of_byte<3>(of_lane, high);
    }
  }
};

// E2M1: half the values 0 1 2 3 4 6 8 12, and their negatives.
template <typename T>
struct Mxfp4 : Codes<T> {
  static constexpr int kScales = 2;
  static constexpr float kSumScale = 0.5f;
  using Stored = uint32_t;  // two bytes, of the halves

  static __device__ __forceinline__ float value(uint32_t code) {
    const float magnitude = float(0xc8643210u >> (4 * (code & 7)) & 15u);
    return code & 8 ? -magnitude : magnitude;
  }
  static __device__ __forceinline__ void fill(uint8_t* table, const Arguments&) {
    fill_pairs(table, [](uint32_t byte) { return pack(value(byte & 15), value(byte >> 4), T{}); });
  }
  static __device__ __forceinline__ Stored load(const Arguments& p, uint64_t row, uint32_t stage) {
    return *reinterpret_cast<const uint16_t*>(p.scales + row * (p.in / 32) + 2 * stage);
  }
  // 2 ^ (byte - 127); byte 0 gives the subnormal.
  static __device__ __forceinline__ float power(uint32_t byte) {
    return __uint_as_float(max(byte << 23, 0x00400000u));
  }
  static __device__ __forceinline__ float2 scales(const Arguments&, const float*, Stored stored) {
    return {power(stored & 255), power(stored >> 8)};
  }
};

template <typename T, bool kNested>
struct Nf4 : Codes<T> {
  static constexpr int kScales = 1;
  static constexpr float kSumScale = 1.f / kTableScale<T>;
  using Stored = StoredAbsmax;

  static __device__ __forceinline__ void fill(uint8_t* table, const Arguments& p) {
    fill_pairs(table, [&](uint32_t byte) {
      return pack(p.code_map[byte >> 4] * kTableScale<T>, p.code_map[byte & 15] * kTableScale<T>, T{});
    });
  }
  static __device__ __forceinline__ Stored load(const Arguments& p, uint64_t row, uint32_t stage) {
    const uint64_t block = row * (p.in / kBlock) + stage;
    if constexpr (kNested) {
      return {p.nested_absmax[block / kNestedBlock], p.scales[block]};
    } else {
      return {reinterpret_cast<const float*>(p.scales)[block], 0u};
    }
  }
  static __device__ __forceinline__ float2 scales(const Arguments& p, const float* map, Stored stored) {
    const float absmax = decode_absmax<kNested>(stored, map, p.offset);
    return {absmax, absmax};
  }
};

// 16-bit weights, in the order of x.
template <typename T>
struct Plain {
  static constexpr int kWarps = 4, kScales = 0;
  static constexpr uint32_t kTableBytes = 0, kWords = 8, kStageBytes = kWarps * 4 * kGroupWords * 16;
  static constexpr float kSumScale = 1.f;
  struct Stored {};

  static __device__ __forceinline__ void fill(uint8_t*, const Arguments&) {
  }
  static __device__ __forceinline__ uint32_t word_at(uint32_t row, uint32_t word) {
    return x_word_at(row, word);
  }
  static __device__ __forceinline__ Stored load(const Arguments&, uint64_t, uint32_t) {
    return {};
  }
  static __device__ __forceinline__ void operands(uint32_t (&a)[4][4], const uint8_t*, const uint8_t* stage,
                                                  uint32_t tile) {
    const uint32_t lane = threadIdx.x % 32, row = tile * 16 + lane / 4, t = lane % 4;
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint4 low = *reinterpret_cast<const uint4*>(stage + word_at(row, 4 * half + t));
      const uint4 high = *reinterpret_cast<const uint4*>(stage + word_at(row + 8, 4 * half + t));
      uint32_t (&first)[4] = a[2 * half];
      uint32_t (&second)[4] = a[2 * half + 1];
      first[0] = low.x, first[1] = high.x, first[2] = low.y, first[3] = high.y;
      second[0] = low.z, second[1] = high.z, second[2] = low.w, second[3] = high.w;
    }
  }
};

}  // namespace localq::grouped
