// Checks of arguments that need no CUDA headers. A message names the argument and its value.
#pragma once

#include <cstdint>

namespace localq {

// Defined in require.cpp, so that no kernel file compiles string code for every architecture.
[[noreturn]] void refuse(const char* op, const char* argument, int64_t value, const char* rule);

// Throws std::invalid_argument (ValueError in Python): "op: argument = value, rule".
inline void require(bool holds, const char* op, const char* argument, int64_t value, const char* rule) {
  if (!holds) refuse(op, argument, value, rule);
}

inline void require_aligned(const void* pointer, int bytes, const char* op, const char* argument) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  require(pointer != nullptr, op, argument, 0, "must not be null");
  require(address % bytes == 0, op, argument, static_cast<int64_t>(address % bytes), "bytes past an aligned address");
}

}  // namespace localq
