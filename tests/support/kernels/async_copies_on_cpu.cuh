// In place of csrc/common/async_copies.cuh, behind vq_machine_on_cpu.cuh: copies take place when they are waited for, at the latest
// moment that a GPU may take, so that what reads too early reads what was there before.
#pragma once

#include <deque>
#include <unordered_map>
#include <vector>

#include "lookup/intrinsics.cuh"

namespace on_cpu {

struct Copy {
  uint8_t* to;
  const uint8_t* from;
  uint32_t bytes;
};
using Copies = std::vector<Copy>;
struct Groups {
  std::deque<Copies> ended;
  Copies open;
};
inline Groups& groups() {
  static std::unordered_map<const void*, Groups> of_threads;
  return of_threads[now];
}

inline void copy_later(uint8_t* to, const uint8_t* from, uint32_t bytes) {
  if (reinterpret_cast<uintptr_t>(to) % bytes != 0 || reinterpret_cast<uintptr_t>(from) % bytes != 0) __builtin_trap();
  groups().open.push_back({to, from, bytes});
}

}  // namespace on_cpu

inline void __syncwarp() {
  on_cpu::meet_lanes([] {});
}

namespace localq {

inline void copy_async(uint8_t* to, const uint8_t* from) {
  on_cpu::copy_later(to, from, 16);
}
inline void copy_async_or_zero(uint8_t* to, const uint8_t* from, bool copies) {
  static const uint8_t zeros alignas(16)[16] = {};
  copy_async(to, copies ? from : zeros);
}
inline void end_copies() {
  on_cpu::Groups& groups = on_cpu::groups();
  groups.ended.push_back(std::move(groups.open));
  groups.open.clear();
}
template <int kLater>
void wait_for_copies() {
  std::deque<on_cpu::Copies>& ended = on_cpu::groups().ended;
  for (; ended.size() > kLater; ended.pop_front()) {
    for (const on_cpu::Copy& copy : ended.front()) std::memcpy(copy.to, copy.from, copy.bytes);
  }
}

}  // namespace localq
