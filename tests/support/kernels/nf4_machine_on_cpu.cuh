// In place of csrc/nf4/intrinsics.cuh, over block_machine_on_cpu.cuh. Reads of codes and stored absmax (__ldcs) are
// counted byte by byte and warp by warp, and may not be anywhere else.
#pragma once

#include "common/block_loads.cuh"

namespace on_cpu {

struct Stored {
  const uint8_t* begin;
  std::vector<uint8_t> reads;  // of each byte
};
inline std::vector<Stored> stored;
inline int64_t bytes_of_warp[16];

template <typename T>
T read_stored(const T* from) {
  const auto* const at = reinterpret_cast<const uint8_t*>(from);
  for (Stored& of : stored) {
    if (at < of.begin || at + sizeof(T) > of.begin + of.reads.size()) continue;
    for (size_t i = 0; i < sizeof(T); ++i) ++of.reads[at - of.begin + i];
    bytes_of_warp[now->number / 32] += sizeof(T);
    return *from;
  }
  __builtin_trap();  // outside of all of them
}

}  // namespace on_cpu

#undef __ldcs
#define __ldcs on_cpu::read_stored
#define LOCALQ_DYNAMIC_MEMORY(name) uint8_t* const name = on_cpu::now->block->memory.data()

namespace localq {

inline void load_four(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, const uint4* from) {
  a = from->x, b = from->y, c = from->z, d = from->w;
}
inline void add_pair(float (&sum)[2], const float (&scale)[4], const float (&even)[4], const float (&odd)[4],
                     bool owner) {
  if (!owner) return;
  for (int i = 0; i < 2; ++i) {
    sum[i] = std::fma(scale[2 * i], even[2 * i], sum[i]);
    sum[i] = std::fma(scale[2 * i + 1], odd[2 * i + 1], sum[i]);
  }
}

}  // namespace localq
