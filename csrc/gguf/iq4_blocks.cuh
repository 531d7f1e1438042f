// Block types of 4 bits whose codes are places in a table of 16 values.
#pragma once

#include "gguf/legacy_blocks.cuh"

namespace localq::gguf {

// The values of the 16 codes of four columns of row g, and of four of row g + 8, as the operand A. A look-up is a
// permutation of the bytes of half a table, by the lower three bits of a code; the upper bit chooses the half.
__device__ __forceinline__ void look_up(uint32_t (&a)[4], uint32_t codes) {
  // -127 -104 -83 -65 | -49 -35 -22 -10 | 1 13 25 38 | 53 69 89 113, each + 128
  constexpr uint32_t kTable[4] = {0x3f2d1801u, 0x766a5d4fu, 0xa6998d81u, 0xf1d9c5b5u};
  const uint32_t places = codes & 0x77777777u, halves = (codes >> 1 & 0x44444444u) | 0x32103210u;
  uint32_t bytes[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t lower = __byte_perm(kTable[0], kTable[1], places >> (16 * i));
    const uint32_t upper = __byte_perm(kTable[2], kTable[3], places >> (16 * i));
    bytes[i] = __byte_perm(lower, upper, halves >> (16 * i));
  }
  spread_two_rows(a, bytes[0], bytes[1]);
}

struct IQ4_NLCodes {
  static constexpr int kItemBlocks = 8, kScaleAt = 256, kBytes = kScaleAt + 32;

  static __device__ __forceinline__ void values(uint32_t (&a)[2][4], const uint8_t* block) {
    const uint2 words = reinterpret_cast<const uint2*>(block)[threadIdx.x % 32];
    look_up(a[0], words.x);
    look_up(a[1], words.y);
  }
};
using IQ4_NL = Values32<IQ4_NLCodes>;

struct IQ4_XS {
  static constexpr int kColumns = 256, kItemBlocks = 1, kRun = 0, kBytes = 2176;
  static constexpr bool kSplit = false;

  // Scale of 32 columns of a row, whose header has d, the upper two bits of eight scales, and their lower four.
  static __device__ __forceinline__ float scale_of_run(uint2 header, uint32_t run) {
    const uint32_t low = header.y >> (4 * run) & 15u, high = header.x >> (16 + 2 * run) & 3u;
    const float d = __half2float(as<__half>(uint16_t(header.x)));
    return __fmul_rn(d, float(int(low | high << 4) - 32));
  }

  static __device__ __forceinline__ void product(float (&sum)[4], const uint8_t* block, const X& x, int) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4;
    const auto* headers = reinterpret_cast<const uint2*>(block + 2048);
    const uint2 header[2] = {headers[g], headers[g + 8]};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 words = words_at(block + (32 * i + lane) * 16);
      const uint32_t codes[2][2] = {{words.x, words.y}, {words.z, words.w}};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t a[4];
        float c[4] = {};
        const uint4 b = x.eight(64 * i + 32 * half + 8 * (lane % 4));
        look_up(a, codes[half][0]);
        multiply(c, a, b.x, b.y);
        look_up(a, codes[half][1]);
        multiply(c, a, b.z, b.w);
        add_scaled(sum, c, {scale_of_run(header[0], 2 * i + half), scale_of_run(header[1], 2 * i + half)});
      }
    }
  }

  static __device__ __forceinline__ void weights(float (&w)[2][8], const uint8_t* block, uint32_t run) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4;
    const auto* headers = reinterpret_cast<const uint2*>(block + 2048);
    const uint2 words = *reinterpret_cast<const uint2*>(block + (run / 2 * 32 + lane) * 16 + run % 2 * 8);
    uint32_t a[2][4];
    look_up(a[0], words.x);
    look_up(a[1], words.y);
    scale_values(w, a, {scale_of_run(headers[g], run), scale_of_run(headers[g + 8], run)});
  }
};

}  // namespace localq::gguf
