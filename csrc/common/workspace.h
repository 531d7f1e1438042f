// Scratch memory in which blocks of a launch hand each other sums (exchange.cuh).
#pragma once

#include <cstdint>

namespace localq {

// Every word is kVacant before and after a launch, which writes each word that it uses once and reads it once. For one
// stream of a device at a time.
struct Workspace {
  uint32_t* meeting;
  int64_t words;
};
constexpr uint32_t kVacant = 0xffffffffu;

}  // namespace localq
