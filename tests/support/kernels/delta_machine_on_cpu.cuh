// In place of csrc/delta/intrinsics.cuh, behind vq_machine_on_cpu.cuh. An asynchronous copy arrives when its thread waits
// for it; until then its place holds NaN, so that who reads too early, or still reads what it replaces, computes NaN.
#pragma once

#include <map>

#include "common/shared_memory.cuh"

namespace on_cpu {

struct Copy {
  uint8_t* to;
  const uint8_t* from;
};
inline std::map<const Thread*, std::vector<Copy>> copies;

// The 16-bit value at a column of a row of 8, whose address is known.
inline uint32_t half_at(uint32_t row, uint32_t column) {
  uint16_t value;
  std::memcpy(&value, &now->block->memory.at(row + 2 * column + 1) - 1, 2);
  return value;
}
inline std::array<uint32_t, 32> rows_of_lanes(const void* row) {
  const uint32_t address = localq::shared_address(row);
  if (address % 16 != 0) __builtin_trap();
  count(lookups, address, 16);
  return exchanged(address);
}

}  // namespace on_cpu

inline void __syncwarp() {
  on_cpu::meet_lanes([] {});
}

namespace localq::delta {


inline float reciprocal(float x) {
  return x < std::ldexp(1.f, 126) ? 1 / x : x != x ? x : 0.f;
}
inline void copy_async(void* to, const void* from) {
  const uint32_t place = shared_address(to);
  if (place % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) __builtin_trap();
  uint8_t* const first = &on_cpu::now->block->memory.at(place + 15) - 15;
  std::memset(first, 0xff, 16);
  on_cpu::copies[on_cpu::now].push_back({first, static_cast<const uint8_t*>(from)});
}
inline void wait_for_copies() {
  for (const on_cpu::Copy& copy : on_cpu::copies[on_cpu::now]) std::memcpy(copy.to, copy.from, 16);
  on_cpu::copies.erase(on_cpu::now);
}
inline void load_matrices(uint32_t (&to)[4], const void* row) {
  const auto rows = on_cpu::rows_of_lanes(row);
  const uint32_t lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    const uint32_t at = rows[8 * i + lane / 4], column = 2 * (lane % 4);
    to[i] = on_cpu::half_at(at, column) | on_cpu::half_at(at, column + 1) << 16;
  }
}
inline void load_transposed(uint32_t (&to)[4], const void* row) {
  const auto rows = on_cpu::rows_of_lanes(row);
  const uint32_t lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    const uint32_t at = 8 * i + 2 * (lane % 4);
    to[i] = on_cpu::half_at(rows[at], lane / 4) | on_cpu::half_at(rows[at + 1], lane / 4) << 16;
  }
}
inline uint32_t transposed(uint32_t pair) {
  const auto pairs = on_cpu::exchanged(pair);
  const uint32_t lane = threadIdx.x % 32, row = 2 * (lane % 4), column = lane / 4;
  const auto value = [&](uint32_t at) { return pairs[4 * at + column / 2] >> (16 * (column % 2)) & 0xffffu; };
  return value(row) | value(row + 1) << 16;
}

}  // namespace localq::delta
