// delta_verify on a CPU beside delta_decode, whose bits it must give: launchers and kernels
// (tests/kernels/test_delta_verify_emulated.py puts the files together).
#include "common/launch.h"
#include "delta/delta.h"
#include "facts_on_cpu.h"

// What went wrong, or null.
extern "C" const char* delta_decode_on_cpu(const localq::DeltaStep* step, int type) {
  return on_cpu::fault_of(132, 0, [&] { localq::delta_decode(*step, static_cast<localq::Type>(type), 0, nullptr); });
}
extern "C" const char* delta_verify_on_cpu(const localq::DeltaRows* step, int type) {
  return on_cpu::fault_of(132, 0, [&] { localq::delta_verify(*step, static_cast<localq::Type>(type), 0, nullptr); });
}
