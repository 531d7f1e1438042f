// bcq_dequantize: the kernel (dequantize.cu says what it does).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "bcq/gemv.h"
#include "common/gemv.cuh"
#include "common/launch.h"

namespace localq::bcq_weights {

constexpr uint32_t kTile = 16, kThreads = 256;
constexpr uint32_t kOfBlock = 128;                    // threads of a block of 128 columns: 16 eights of 8 pairs of rows
constexpr uint32_t kUnit = 256, kScales = 2 * kTile;  // bytes: a plane of a block, of a group

struct Arguments {
  const uint8_t* codes;
  const uint8_t* scales;
  uint32_t planes, layers, eights, blocks, groups,
      group_shift;                    // eights of columns, blocks of 128, log2 of a group's eights
  uint32_t first_tile, rows, chunks;  // rows to write, counted from the first tile's; chunks of two blocks of a row
};

// What a thread has: eight columns of rows g and g + 8 in each layer.
struct Pair {
  uint2 codes[kMaxPlanes];
  uint32_t scales[kMaxPlanes + 1];
};

__device__ __forceinline__ float half_of(uint32_t scales, int h) {
  const uint16_t bits = uint16_t(h == 0 ? scales & 0xffffu : scales >> 16);
  return __half2float(reinterpret_cast<const __half&>(bits));
}

// The eight weights of row g + 8 h whose signs begin at bit `first`, summed in the order of the definition.
template <typename T>
__device__ __forceinline__ uint4 weights_of(const Arguments& p, const Pair& pair, int h, uint32_t first) {
  float value[8] = {};
#pragma unroll
  for (int b = 0; b < kMaxPlanes; ++b) {
    if (uint32_t(b) >= p.planes) break;
    const float scale = half_of(pair.scales[b], h);
    const uint32_t signs = (h == 0 ? pair.codes[b].x : pair.codes[b].y) >> first;
#pragma unroll
    for (int j = 0; j < 8; ++j) value[j] += signs >> j & 1 ? scale : -scale;
  }
  const float zero = half_of(pair.scales[kMaxPlanes], h);
  uint32_t word[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    T low, high;
    round_to(value[2 * j] + zero, low);
    round_to(value[2 * j + 1] + zero, high);
    word[j] = reinterpret_cast<const uint16_t&>(low) | uint32_t(reinterpret_cast<const uint16_t&>(high)) << 16;
  }
  return make_uint4(word[0], word[1], word[2], word[3]);
}

// The thread's signs and scales of a tile: of block `block`, eight `eight` of it, pair g of rows.
__device__ __forceinline__ void load_pair(Pair& pair, const Arguments& p, uint32_t tile, uint32_t block, uint32_t eight,
                                          uint32_t g) {
  const uint64_t at = p.first_tile + tile;
  const uint32_t group = (block * 16 + eight) >> p.group_shift;
  const uint8_t* const codes = p.codes + (at * p.blocks + block) * p.planes * kUnit + g * 32 + eight / 4 * 8;
  const uint8_t* const of_tile = p.scales + at * p.layers * p.groups * kScales + g * 4;
#pragma unroll
  for (uint32_t b = 0; b < kMaxPlanes; ++b) {
    if (b >= p.planes) break;
    pair.codes[b] = __ldg(reinterpret_cast<const uint2*>(codes + b * kUnit));
    pair.scales[b] = __ldg(reinterpret_cast<const uint32_t*>(of_tile + (group * p.planes + b) * kScales));
  }
  if (p.layers == p.planes) return;
  const uint8_t* const zeros = of_tile + (p.groups * p.planes + group) * kScales;
  pair.scales[kMaxPlanes] = __ldg(reinterpret_cast<const uint32_t*>(zeros));
}

template <typename T>
__global__ void __launch_bounds__(kThreads) bcq_dequantize_kernel(Arguments p, T* out) {
  release_dependents();
  const uint32_t tile = blockIdx.x / p.chunks, eight = threadIdx.x % 16, g = threadIdx.x / 16 % 8;
  const uint32_t block = blockIdx.x % p.chunks * (kThreads / kOfBlock) + threadIdx.x / kOfBlock;
  const bool some = block * 16 + eight < p.eights;
  Pair pair = {};
  if (some) load_pair(pair, p, tile, block, eight, g);
  dependency_wait();
  if (!some) return;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint32_t row = tile * kTile + g + 8 * h;
    if (row >= p.rows) break;
    reinterpret_cast<uint4*>(out)[uint64_t(row) * p.eights + block * 16 + eight] =
        weights_of<T>(p, pair, h, eight % 4 * 8);
  }
}

}  // namespace localq::bcq_weights
