// sample, dry_match and adjust on a CPU: launchers and kernels (tests/kernels/test_sampling_emulated.py puts the files
// together).
#include "launch.h"
#include "sampling.h"

static localq::DeviceFacts facts;

const localq::DeviceFacts& localq::device_facts(int, const char*) {
  return facts;
}

namespace {

template <typename Run>
const char* fault_of(int multiprocessors, Run run) {
  static std::string said;
  facts = {multiprocessors, 0, true, true};
  try {
    run();
  } catch (const std::exception& error) {
    said = error.what();
    return said.c_str();
  }
  return nullptr;
}

}  // namespace

// What went wrong, or null.
extern "C" const char* sample_on_cpu(const localq::Sample* s, bool greedy, int multiprocessors) {
  return fault_of(multiprocessors, [&] { localq::sample(*s, greedy, 0, nullptr); });
}
extern "C" const char* dry_match_on_cpu(const localq::DryMatch* m, int multiprocessors) {
  return fault_of(multiprocessors, [&] { localq::dry_match(*m, 0, nullptr); });
}
extern "C" const char* adjust_on_cpu(const localq::Adjust* a, int multiprocessors) {
  return fault_of(multiprocessors, [&] { localq::adjust(*a, 0, nullptr); });
}
