// delta_decode on a CPU: launcher and kernel (tests/kernels/test_delta_net_emulated.py puts the files together).
#include "facts_on_cpu.h"
#include "common/launch.h"
#include "delta/delta.h"

// What went wrong, or null.
extern "C" const char* delta_decode_on_cpu(const localq::DeltaStep* step, int type) {
  return on_cpu::fault_of(132, 0, [&] { localq::delta_decode(*step, static_cast<localq::Type>(type), 0, nullptr); });
}
