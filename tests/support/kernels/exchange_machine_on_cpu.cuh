// In place of csrc/common/exchange.cuh, over vq_machine_on_cpu.cuh. A word may be written where it is vacant only.
#pragma once

#include "common/workspace.h"
#include "lookup/intrinsics.cuh"

namespace on_cpu {
inline int64_t left_words;  // for other blocks
}

namespace localq {

inline void put(uint32_t* to, uint32_t word) {
  if (*to != kVacant || word == kVacant) __builtin_trap();
  *to = word;
  ++on_cpu::events, ++on_cpu::left_words;
}
inline uint32_t word_of(float sum) {
  const uint32_t bits = on_cpu::bits<uint32_t>(sum);
  return bits == kVacant ? 0x7fffffffu : bits;
}
inline uint32_t get_if(bool wanted, const uint32_t* from) {
  if (!wanted) return 0;
  if (*from == kVacant) on_cpu::leave();  // others go on meanwhile
  return *from;
}
inline uint4 get_four(const uint32_t* from) {
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0) __builtin_trap();
  for (int i = 0; i < 4; ++i) get_if(true, from + i);
  return *reinterpret_cast<const uint4*>(from);
}

}  // namespace localq
