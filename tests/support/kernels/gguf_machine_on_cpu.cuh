// In place of csrc/gguf/intrinsics.cuh, behind vq_machine_on_cpu.cuh: copies take place when they are waited for, at the latest
// moment that a GPU may take, so that what reads too early reads what was there before.
#pragma once

#include <deque>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lookup/intrinsics.cuh"

namespace on_cpu {

using Copies = std::vector<std::pair<uint8_t*, const uint8_t*>>;
struct Groups {
  std::deque<Copies> ended;
  Copies open;
};
inline Groups& groups() {
  static std::unordered_map<const void*, Groups> of_threads;
  return of_threads[now];
}

}  // namespace on_cpu

inline void __syncwarp() {
  on_cpu::meet_lanes([] {});
}

namespace localq::gguf {

inline void copy_async(uint8_t* to, const uint8_t* from) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) __builtin_trap();
  on_cpu::groups().open.emplace_back(to, from);
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
    for (const auto& [to, from] : ended.front()) std::memcpy(to, from, 16);
  }
}

}  // namespace localq::gguf
