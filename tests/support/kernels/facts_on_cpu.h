// What the calls of kernels on a CPU share (`*_on_cpu.cpp`, behind vq_machine_on_cpu.cuh): facts about the device, as a
// test has them, and what went wrong. For one file of a library.
#pragma once

#include <exception>
#include <string>

#include "common/check.cpp"

namespace on_cpu {

inline localq::DeviceFacts facts;  // that launchers ask for

// What went wrong when it ran, or null.
template <typename Run>
const char* fault_of(Run run) {
  static std::string said;
  try {
    run();
  } catch (const std::exception& error) {
    said = error.what();
    return said.c_str();
  }
  return nullptr;
}

// The same on a device of so many multiprocessors, and so many bytes of shared memory a block.
template <typename Run>
const char* fault_of(int multiprocessors, int shared_bytes, Run run) {
  facts = {multiprocessors, shared_bytes, true, true};
  return fault_of(run);
}

// The same; `counts`: accesses and conflicts of look-ups, then of stores.
template <typename Run>
const char* counted(int multiprocessors, int shared_bytes, int64_t* counts, Run run) {
  lookups = stores = {};
  const char* const fault = fault_of(multiprocessors, shared_bytes, run);
  counts[0] = lookups.accesses, counts[1] = lookups.conflicts;
  counts[2] = stores.accesses, counts[3] = stores.conflicts;
  return fault;
}

// Every block of `body`, so many as meet in a result together. The launcher asks for more shared memory, `asked`, than
// a block needs: what lies behind `need` is as it was.
template <typename Body>
void run_slices(uint32_t all, uint32_t slices, uint32_t asked, uint32_t need, Body run) {
  blocks = all, body = run;
  for (uint32_t first = 0; first < all; first += slices) {
    run_together(first, slices, asked + 64);
    for (const auto& block : running) {
      for (size_t i = need; i < block->memory.size(); ++i) {
        if (block->memory[i] != 0xff) __builtin_trap();
      }
    }
  }
}

}  // namespace on_cpu

const localq::DeviceFacts& localq::device_facts(int, const char*) {
  return on_cpu::facts;
}
