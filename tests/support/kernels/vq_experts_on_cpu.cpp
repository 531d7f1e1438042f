// vq_experts on a CPU: its launchers and its kernel (tests/formats/codebooks/test_experts_kernel_emulated.py puts the files
// together; common/launch.h is vq_launch_on_cpu.h).
#include "common/check.cpp"
#include "lookup/experts.h"

namespace on_cpu {
localq::DeviceFacts facts;
}

namespace localq {
const DeviceFacts& device_facts(int, const char*) {
  return on_cpu::facts;
}
}  // namespace localq

static const char* fault_of(const std::function<void()>& run, int multiprocessors, int shared_bytes) {
  static std::string said;
  on_cpu::facts = {multiprocessors, shared_bytes, true, true};
  on_cpu::lookups = on_cpu::stores = {};
  try {
    run();
  } catch (const std::exception& error) {
    said = error.what();
    return said.c_str();
  }
  return nullptr;
}

// What went wrong, or null.
extern "C" const char* gate_up_on_cpu(const localq::VqExperts* e, const localq::GemvExtras* norm,
                                      const localq::VqWorkspace* workspace, const int32_t* chosen, int active,
                                      const void* x, void* y, int type, int multiprocessors, int shared_bytes) {
  return fault_of(
      [&] {
        localq::vq_experts_gate_up(*e, *norm, *workspace, chosen, active, x, y, static_cast<localq::Type>(type), 0,
                                   nullptr);
      },
      multiprocessors, shared_bytes);
}
extern "C" const char* down_on_cpu(const localq::VqExperts* e, const uint8_t* signs,
                                   const localq::VqWorkspace* workspace, const int32_t* chosen, const float* weights,
                                   int active, const void* x, const void* residual, void* y, int type,
                                   int multiprocessors, int shared_bytes) {
  return fault_of(
      [&] {
        localq::vq_experts_down(*e, signs, *workspace, chosen, weights, active, x, residual, y,
                                static_cast<localq::Type>(type), 0, nullptr);
      },
      multiprocessors, shared_bytes);
}
extern "C" int64_t bank_conflicts_on_cpu() {
  return on_cpu::lookups.conflicts + on_cpu::stores.conflicts;
}
