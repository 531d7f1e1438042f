// int4_gemv and int4_dequantize on a CPU (tests/formats/int4/test_kernel_emulated.py puts the files together).
#include "facts_on_cpu.h"
#include "int4/int4.h"
#include "common/launch.h"

// What went wrong, or null.
extern "C" const char* int4_gemv_on_cpu(const localq::Int4* matrices, int count, int stored,
                                        const localq::GemvExtras* extras, const void* x, void* y, int type, int rows,
                                        int multiprocessors, int shared_bytes) {
  return on_cpu::fault_of(multiprocessors, shared_bytes, [&] {
    localq::int4_gemv(matrices, count, *extras, x, y, static_cast<localq::Type>(type),
                      static_cast<localq::Type>(stored), rows, 0, nullptr);
  });
}

extern "C" const char* int4_dequantize_on_cpu(const localq::Int4* matrix, int stored, void* out, int type,
                                              int64_t row_begin, int64_t row_count) {
  return on_cpu::fault_of(1, 101376, [&] {
    localq::int4_dequantize(*matrix, static_cast<localq::Type>(stored), out, static_cast<localq::Type>(type), row_begin,
                            row_count, 0, nullptr);
  });
}
