// NVFP4: codes in E2M1, an unsigned scale in e4m3 for 16 columns, and a factor for the matrix.
//
// A lane has the 16 columns of one scale. Scales are multiplied into the weights in f16: E2M1 times e4m3 times 2^-7 has
// at most 6 significant bits and no value below 2^-17, so it is exact, and sums run through all columns.
#pragma once

#include "common/small_floats.cuh"
#include "gguf/legacy_blocks.cuh"

namespace localq::gguf {

struct NVFP4 : NoTable {
  static constexpr int kColumns = 64, kItemBlocks = 4, kRun = 0, kScalesAt = 512, kBytes = kScalesAt + 64;
  static constexpr bool kSplit = false;
  static constexpr bool kHasFactor = true;

  // The scales that lane `lane` of the tile block holds, of rows g and g + 8, times 2^-8, in both halves. Their highest
  // bit has no meaning, and 0x7f is 0.
  static __device__ __forceinline__ void scales(uint32_t (&pair)[2], const uint8_t* block, uint32_t lane) {
    const uint32_t bytes = reinterpret_cast<const uint16_t*>(block + kScalesAt)[lane];
    pair[0] = (bytes & 0xffu) == 0x7fu ? 0u : __byte_perm(bytes, 0u, 0x0404) >> 1 & 0x3f803f80u;
    pair[1] = bytes >> 8 == 0x7fu ? 0u : __byte_perm(bytes, 0u, 0x1414) >> 1 & 0x3f803f80u;
  }

  static __device__ __forceinline__ void product(float (&sum)[4], const uint8_t* item, const X& x, int blocks) {
    const uint32_t lane = threadIdx.x % 32, t = lane % 4;
    float c[4] = {};
#pragma unroll
    for (int i = 0; i < kItemBlocks; ++i) {
      if (i >= blocks) break;
      const uint8_t* const block = item + i * kBytes;
      const uint4 words = words_at(block + lane * 16);
      const uint4 b[2] = {x.eight(64 * i + 16 * t), x.eight(64 * i + 16 * t + 8)};
      uint32_t pair[2];
      scales(pair, block, lane);
      const __half2 up = twice(32768.f);
      const __half2 scale[2] = {__hmul2(as<__half2>(pair[0]), up), __hmul2(as<__half2>(pair[1]), up)};
      const uint32_t codes[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        uint32_t a[4];
        spread_e2m1(a, codes[k]);
        scale_codes(a, scale[0], scale[1]);
        const uint4& eight = b[k / 2];
        multiply(c, a, k % 2 == 0 ? eight.x : eight.z, k % 2 == 0 ? eight.y : eight.w);
      }
    }
    add_scaled(sum, c, {128.f, 128.f});
  }

  static __device__ __forceinline__ void weights(float (&w)[2][8], const uint8_t* block, uint32_t run) {
    const uint32_t lane = threadIdx.x % 32, t = lane % 4, owner = lane - t + 2 * run + t / 2;
    const uint2 words = *reinterpret_cast<const uint2*>(block + owner * 16 + t % 2 * 8);
    uint32_t pair[2], a[2][4];
    scales(pair, block, owner);
    spread_e2m1(a[0], words.x);
    spread_e2m1(a[1], words.y);
    // Code 8 is +0, not -0. A sum that is 0 is +0.
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      a[i / 4][i % 4] = as<uint32_t>(__hadd2(as<__half2>(a[i / 4][i % 4]), twice(0.f)));
    }
    constexpr float kUnit = 4194304.f;  // 2^14 of a code times 2^8 of a scale
    scale_values(w, a, {both_rows(pair[0]).x * kUnit, both_rows(pair[1]).x * kUnit});
  }
};

}  // namespace localq::gguf
