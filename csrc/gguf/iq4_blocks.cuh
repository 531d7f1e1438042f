// Block types of 4 bits whose codes are places in a table of 16 values.
//
// Products look codes up in pairs (common/pair_table.cuh). Where x leaves no room for it, bytes of registers are
// permuted: 67 us for 28672 x 8192 on an H200, 42 % of its bandwidth.
#pragma once

#include "common/pair_table.cuh"
#include "gguf/legacy_blocks.cuh"

namespace localq::gguf {

// The value of a code, -127 -104 -83 -65 | -49 -35 -22 -10 | 1 13 25 38 | 53 69 89 113, + 128 as a byte.
constexpr uint32_t kIQ4Values[4] = {0x3f2d1801u, 0x766a5d4fu, 0xa6998d81u, 0xf1d9c5b5u};

// The values of the 16 codes of four columns of row g, and of four of row g + 8, as the operand A. A look-up is a
// permutation of the bytes of half a table, by the lower three bits of a code; the upper bit chooses the half.
__device__ __forceinline__ void look_up(uint32_t (&a)[4], uint32_t codes) {
  const uint32_t places = codes & 0x77777777u, halves = (codes >> 1 & 0x44444444u) | 0x32103210u;
  uint32_t bytes[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t lower = __byte_perm(kIQ4Values[0], kIQ4Values[1], places >> (16 * i));
    const uint32_t upper = __byte_perm(kIQ4Values[2], kIQ4Values[3], places >> (16 * i));
    bytes[i] = __byte_perm(lower, upper, halves >> (16 * i));
  }
  spread_two_rows(a, bytes[0], bytes[1]);
}

struct PairTable {
  static constexpr uint32_t kTableBytes = kPairTableBytes;

  // Called by all threads; a barrier must follow.
  static __device__ __forceinline__ void fill_table(uint8_t* table) {
    fill_pairs(table, [](uint32_t byte) {
      uint32_t low[4], high[4];
      look_up(low, byte % 16), look_up(high, byte / 16);
      return __byte_perm(low[0], high[0], 0x5410);
    });
  }
};

// `look_up`, with the table if there is one.
template <class Table>
__device__ __forceinline__ void values_of(uint32_t (&a)[4], const uint8_t* table, uint32_t codes) {
  if constexpr (Table::kTableBytes == 0) {
    look_up(a, codes);
  } else {
    const uint8_t* const of_lane = table + threadIdx.x % 32 * 4;
    a[0] = pair_of_byte<0>(of_lane, codes), a[2] = pair_of_byte<1>(of_lane, codes);
    a[1] = pair_of_byte<2>(of_lane, codes), a[3] = pair_of_byte<3>(of_lane, codes);
  }
}

template <class Table>
struct IQ4_NLCodes : Table {
  static constexpr int kItemBlocks = 8, kScaleAt = 256, kBytes = kScaleAt + 32;

  static __device__ __forceinline__ void values(uint32_t (&a)[2][4], const uint8_t* block, const X& x) {
    const uint2 words = reinterpret_cast<const uint2*>(block)[threadIdx.x % 32];
    values_of<Table>(a[0], x.table, words.x);
    values_of<Table>(a[1], x.table, words.y);
  }

  static __device__ __forceinline__ void values(uint32_t (&a)[2][4], const uint8_t* block) {
    const uint2 words = reinterpret_cast<const uint2*>(block)[threadIdx.x % 32];
    look_up(a[0], words.x);
    look_up(a[1], words.y);
  }
};
using IQ4_NL = Values32<IQ4_NLCodes<PairTable>>;
using IQ4_NLWithoutTable = Values32<IQ4_NLCodes<NoTable>>;

template <class Table>
struct IQ4_XSBlock : Table {
  static constexpr int kColumns = 256, kItemBlocks = 1, kRun = 0, kBytes = 2176;
  static constexpr bool kSplit = false;

  // Integer scale of 32 columns of a row, whose header has d, the upper two bits of eight scales, and their lower four.
  static __device__ __forceinline__ float scale_of_run(uint2 header, uint32_t run) {
    const uint32_t low = header.y >> (4 * run) & 15u, high = header.x >> (12 + 2 * run) & 48u;
    return as<float>(low | high | 0x4b000000u) - (8388608.f + 32.f);
  }

  static __device__ __forceinline__ float d_of(uint2 header) {
    return __half2float(as<__half>(uint16_t(header.x)));
  }

  static __device__ __forceinline__ void product(float (&sum)[4], const uint8_t* block, const X& x, int) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4;
    const auto* headers = reinterpret_cast<const uint2*>(block + 2048);
    const uint2 header[2] = {headers[g], headers[g + 8]};
    float all[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 words = words_at(block + (32 * i + lane) * 16);
      const uint32_t codes[2][2] = {{words.x, words.y}, {words.z, words.w}};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t a[4];
        float c[4] = {};
        const uint4 b = x.eight(64 * i + 32 * half + 8 * (lane % 4));
        values_of<Table>(a, x.table, codes[half][0]);
        multiply(c, a, b.x, b.y);
        values_of<Table>(a, x.table, codes[half][1]);
        multiply(c, a, b.z, b.w);
        add_scaled(all, c, {scale_of_run(header[0], 2 * i + half), scale_of_run(header[1], 2 * i + half)});
      }
    }
    add_scaled(sum, all, {d_of(header[0]), d_of(header[1])});
  }

  static __device__ __forceinline__ void weights(float (&w)[2][8], const uint8_t* block, uint32_t run) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4;
    const auto* headers = reinterpret_cast<const uint2*>(block + 2048);
    const uint2 words = *reinterpret_cast<const uint2*>(block + (run / 2 * 32 + lane) * 16 + run % 2 * 8);
    const uint2 header[2] = {headers[g], headers[g + 8]};
    uint32_t a[2][4];
    look_up(a[0], words.x);
    look_up(a[1], words.y);
    scale_values(w, a,
                 {__fmul_rn(d_of(header[0]), scale_of_run(header[0], run)),
                  __fmul_rn(d_of(header[1]), scale_of_run(header[1], run))});
  }
};
using IQ4_XS = IQ4_XSBlock<PairTable>;
using IQ4_XSWithoutTable = IQ4_XSBlock<NoTable>;

}  // namespace localq::gguf
