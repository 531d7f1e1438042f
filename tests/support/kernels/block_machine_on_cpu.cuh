// In place of csrc/common/block_loads.cuh, over row_machine_on_cpu.cuh. Conflicts between banks are counted.
#pragma once

#include "common/row_loads.cuh"

namespace localq {

inline uint32_t load_scale_16(const uint8_t* at, int left, int needed) {
  return left > needed ? *reinterpret_cast<const uint16_t*>(at) : 0u;
}
inline uint32_t load_scale_8(const uint8_t* at, int left, int needed) {
  return left > needed ? *at : 0u;
}
inline float load_scale_f32(const void* at, int left, int needed) {
  return left > needed ? *static_cast<const float*>(at) : 0.f;
}
inline uint4 load_word(uint32_t at) {
  on_cpu::count(on_cpu::lookups, at, 16);
  return *reinterpret_cast<const uint4*>(&on_cpu::now->block->memory.at(at + 15) - 15);
}

inline void prefetch(const void*) {
}

}  // namespace localq
