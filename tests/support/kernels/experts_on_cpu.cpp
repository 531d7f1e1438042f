// Mixtures of experts and MXFP4 on a CPU: launchers and kernels (tests/formats/experts/test_kernel_emulated.py puts the files
// together).
#include "experts/experts.h"
#include "experts/grouped.h"
#include "facts_on_cpu.h"
#include "common/launch.h"

using localq::Type;

extern "C" {
// Conflicts between banks at loads of x in MXFP4, since it was last asked.
int64_t conflicts_on_cpu() {
  const int64_t found = on_cpu::lookups.conflicts;
  on_cpu::lookups = {};
  return found;
}

// What went wrong, or null.
const char* route_on_cpu(const float* logits, int64_t experts, int active, int how, float* weights, int32_t* chosen) {
  return on_cpu::fault_of(1, 1 << 16, [&] {
    localq::route(logits, experts, active, static_cast<localq::Weighing>(how), weights, chosen, 0, nullptr);
  });
}
const char* router_on_cpu(const localq::Router* r, int type) {
  return on_cpu::fault_of(1, 1 << 16, [&] { localq::router(*r, static_cast<Type>(type), 0, nullptr); });
}
const char* experts_gate_up_on_cpu(const localq::ExpertsGateUp* e, int type, int multiprocessors, int shared_bytes) {
  return on_cpu::fault_of(multiprocessors, shared_bytes,
                          [&] { localq::experts_gate_up(*e, static_cast<Type>(type), 0, nullptr); });
}
const char* experts_down_on_cpu(const localq::ExpertsDown* e, int type, int multiprocessors, int shared_bytes) {
  return on_cpu::fault_of(multiprocessors, shared_bytes,
                          [&] { localq::experts_down(*e, static_cast<Type>(type), 0, nullptr); });
}
const char* experts_sort_on_cpu(const localq::ExpertEntries* e) {
  return on_cpu::fault_of(1, 1 << 16, [&] { localq::experts_sort(*e, 0, nullptr); });
}
const char* experts_gemm_on_cpu(const localq::ExpertsGemm* e, int type, int multiprocessors, int shared_bytes) {
  return on_cpu::fault_of(multiprocessors, shared_bytes,
                          [&] { localq::experts_gemm(*e, static_cast<Type>(type), 0, nullptr); });
}
const char* experts_sum_on_cpu(const void* x, const int32_t* places, const float* weights, void* y, int type,
                               int64_t tokens, int active, int64_t width) {
  return on_cpu::fault_of(1, 1 << 16, [&] {
    localq::experts_sum(x, places, weights, y, static_cast<Type>(type), tokens, active, width, 0, nullptr);
  });
}
const char* mxfp4_gemv_on_cpu(const localq::Mxfp4Matrix* matrices, int count, const localq::GemvExtras* extras,
                              const void* x, void* y, int type, int rows, int multiprocessors, int shared_bytes) {
  return on_cpu::fault_of(multiprocessors, shared_bytes, [&] {
    localq::mxfp4_gemv(matrices, count, *extras, x, y, static_cast<Type>(type), rows, 0, nullptr);
  });
}
const char* mxfp4_dequantize_on_cpu(const uint8_t* codes, const uint8_t* scales, void* out, int type, int64_t count) {
  return on_cpu::fault_of(
      1, 1 << 16, [&] { localq::mxfp4_dequantize(codes, scales, out, static_cast<Type>(type), count, 0, nullptr); });
}
}
