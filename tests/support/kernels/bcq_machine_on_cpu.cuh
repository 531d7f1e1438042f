// In place of csrc/bcq/intrinsics.cuh: what bcq_gemv takes from a GPU, on a CPU.
#pragma once

#include "lookup/intrinsics.cuh"

namespace localq::bcq {

// m16n8k128 of bits with .and.popc, by the PTX manual's layout.
template <bool kBytes>
void count_bits(int (&c)[4], uint32_t low, uint32_t high, uint32_t b) {
  auto* given = on_cpu::warp().exchange().word;
  const uint32_t me = threadIdx.x % 32, words[3] = {low, high, b};
  std::copy(words, words + 3, given[me]);
  on_cpu::meet_lanes([] {});
  for (int i = 0; i < 4; ++i) {
    const uint32_t row = me / 4, column = me % 4 * 2 + i % 2;
    for (uint32_t t = 0; t < 4; ++t) {
      c[i] += __builtin_popcount(given[4 * row + t][i / 2] & given[4 * column + t][2]);
    }
  }
}

inline void load_codes(uint2& to, const uint8_t* from, bool some) {
  if (some) to = *reinterpret_cast<const uint2*>(from);
}
inline void load_scales(uint32_t& to, const uint8_t* from, bool some) {
  if (some) to = *reinterpret_cast<const uint32_t*>(from);
}
inline void prefetch_line(const void*) {
}
inline int add_halves(uint32_t pair, int sum) {
  return sum + int16_t(pair) + int16_t(pair >> 16);
}
inline uint2 load_bits(const uint8_t* from) {
  on_cpu::count(on_cpu::lookups, shared_address(from), 8);
  return *reinterpret_cast<const uint2*>(from);
}
inline void store_bits(uint8_t* to, uint2 bits) {  // by some lanes of a warp: not counted
  *reinterpret_cast<uint2*>(to) = bits;
}

}  // namespace localq::bcq
