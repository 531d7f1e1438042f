// scaled_gemv and scaled_dequantize on a CPU (tests/formats/scaled/test_kernel_emulated.py puts the files together).
#include "common/launch.h"
#include "facts_on_cpu.h"
#include "scaled/scaled.h"

// What went wrong, or null.
extern "C" const char* scaled_gemv_on_cpu(const localq::ScaledMatrix* matrices, int count, int kind,
                                          const localq::GemvExtras* extras, const void* x, void* y, int type, int rows,
                                          int multiprocessors, int shared_bytes) {
  return on_cpu::fault_of(multiprocessors, shared_bytes, [&] {
    localq::scaled_gemv(matrices, count, static_cast<localq::ScaledKind>(kind), *extras, x, y,
                        static_cast<localq::Type>(type), rows, 0, nullptr);
  });
}

extern "C" const char* scaled_dequantize_on_cpu(const localq::ScaledMatrix* matrix, int kind, void* out,
                                                int type, int64_t row_begin, int64_t row_count) {
  return on_cpu::fault_of(1, 101376, [&] {
    localq::scaled_dequantize(*matrix, static_cast<localq::ScaledKind>(kind), out,
                              static_cast<localq::Type>(type), row_begin, row_count, 0, nullptr);
  });
}
