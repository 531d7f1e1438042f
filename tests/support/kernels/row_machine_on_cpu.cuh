// In place of csrc/common/row_loads.cuh, behind vq_machine_on_cpu.cuh: what products row by row take from a GPU.
#pragma once

#include "lookup/intrinsics.cuh"


namespace localq {

inline uint4 load_weights(const uint8_t* at, int left, int needed) {
  return left > needed ? *reinterpret_cast<const uint4*>(at) : uint4{};
}
inline void load_codes(uint4& a, uint4& b, const uint8_t* at_a, const uint8_t* at_b, int left, int needed) {
  if (left <= needed) return;
  a = load_weights(at_a, left, needed), b = load_weights(at_b, left, needed);
}
inline uint4 load_x(const uint8_t* at, int left, int needed) {
  return load_weights(at, left, needed);
}
// Conflicts between banks are counted, of the lanes that load.
inline void load_shared(uint32_t (&to)[4], uint32_t at, int left) {
  const std::array<uint32_t, 32> all = on_cpu::exchanged(left > 0 ? at : ~0u);
  const uint32_t quarter = threadIdx.x % 32 / 8 * 8;  // lanes that are served together
  uint32_t instead = 0;                               // of a lane that loads nothing
  for (uint32_t lane = quarter; lane < quarter + 8; ++lane) instead = all[lane] != ~0u ? all[lane] : instead;
  on_cpu::count(on_cpu::lookups, left > 0 ? at : instead, 16);
  if (left > 0) std::memcpy(to, &on_cpu::now->block->memory.at(at + 15) - 15, 16);
}
// Reads it all, to see that it is there.
inline void prefetch_bytes(const void* from, uint32_t bytes) {
  const auto* at = static_cast<const uint8_t*>(from);
  if (reinterpret_cast<uintptr_t>(at) % 16 != 0 || bytes % 16 != 0) __builtin_trap();
  for (uint32_t i = 0; i < bytes; ++i) static_cast<void>(*const_cast<const volatile uint8_t*>(at + i));
}
inline uint32_t made_here(uint32_t value) {
  return value;
}

}  // namespace localq
