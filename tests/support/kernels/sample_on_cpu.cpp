// sample, dry_match and adjust on a CPU: launchers and kernels (tests/kernels/test_sampling_emulated.py puts the files
// together).
#include "facts_on_cpu.h"
#include "common/launch.h"
#include "step/sampling.h"

// What went wrong, or null.
extern "C" const char* sample_on_cpu(const localq::Sample* s, bool greedy, int multiprocessors) {
  return on_cpu::fault_of(multiprocessors, 0, [&] { localq::sample(*s, greedy, 0, nullptr); });
}
extern "C" const char* dry_match_on_cpu(const localq::DryMatch* m, int multiprocessors) {
  return on_cpu::fault_of(multiprocessors, 0, [&] { localq::dry_match(*m, 0, nullptr); });
}
extern "C" const char* adjust_on_cpu(const localq::Adjust* a, int multiprocessors) {
  return on_cpu::fault_of(multiprocessors, 0, [&] { localq::adjust(*a, 0, nullptr); });
}
