// gather_gemv and vptq_gemv on a CPU (tests/formats/codebooks/test_gather_kernel_emulated.py puts the files together).
#include "facts_on_cpu.h"
#include "gather/gemv.h"
#include "common/launch.h"

// What went wrong, or null.
extern "C" const char* gather_gemv_on_cpu(const localq::GatherMatrix* matrices, int count,
                                          const localq::GemvExtras* extras, const void* x, void* y, int type, int rows,
                                          int multiprocessors, int shared_bytes) {
  return on_cpu::fault_of(multiprocessors, shared_bytes, [&] {
    localq::gather_gemv(matrices, count, *extras, x, y, static_cast<localq::Type>(type), rows, 0, nullptr);
  });
}

extern "C" const char* vptq_gemv_on_cpu(const localq::Vptq* matrices, int count, const localq::GemvExtras* extras,
                                        const void* x, void* y, int type, int rows, int multiprocessors,
                                        int shared_bytes) {
  return on_cpu::fault_of(multiprocessors, shared_bytes, [&] {
    localq::vptq_gemv(matrices, count, *extras, x, y, static_cast<localq::Type>(type), rows, 0, nullptr);
  });
}
