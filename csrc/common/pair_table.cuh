// Weights of 4 bits by look-up: two at once, in a table of 256 pairs in shared memory, of which every lane has a copy
// in its own bank.
#pragma once

#include "common/shared_memory.cuh"

namespace localq {

constexpr uint32_t kPairTableBytes = 256 * 128;

// Fills the table with `pair_of(byte)`, two 16-bit values, the first in the lower half. Called by all threads; a
// barrier must follow.
template <typename PairOf>
__device__ __forceinline__ void fill_pairs(uint8_t* table, PairOf pair_of) {
#pragma unroll 1
  for (uint32_t byte = threadIdx.x / 32; byte < 256; byte += blockDim.x / 32) {
    reinterpret_cast<uint32_t*>(table)[byte * 32 + threadIdx.x % 32] = pair_of(byte);
  }
}

// The pair of byte kByte of `codes`; of_lane: the table + 4 times the lane.
template <int kByte>
__device__ __forceinline__ uint32_t pair_of_byte(const uint8_t* of_lane, uint32_t codes) {
  const uint32_t row = kByte == 0 ? codes << 7 : codes >> (kByte == 0 ? 0 : 8 * kByte - 7);
  return *reinterpret_cast<const uint32_t*>(of_lane + (row & 0x7f80u));
}

}  // namespace localq
