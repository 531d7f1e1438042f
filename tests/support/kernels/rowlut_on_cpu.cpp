// rowlut_gemv and rowlut_dequantize on a CPU (tests/formats/squeezellm/test_kernel_emulated.py puts the files together).
#include "facts_on_cpu.h"
#include "common/launch.h"
#include "rowlut/rowlut.h"

// What went wrong, or null; `counts`: accesses and conflicts of look-ups, then of 16-byte stores of tables.
extern "C" const char* rowlut_gemv_on_cpu(const localq::RowLut* matrices, int count, const localq::GemvExtras* extras,
                                          const void* x, void* y, int type, int rows, int multiprocessors,
                                          int shared_bytes, int64_t* counts) {
  return on_cpu::counted(multiprocessors, shared_bytes, counts, [&] {
    localq::rowlut_gemv(matrices, count, *extras, x, y, static_cast<localq::Type>(type), rows, 0, nullptr);
  });
}

extern "C" const char* rowlut_dequantize_on_cpu(const localq::RowLut* matrix, void* out, int type, int64_t row_begin,
                                                int64_t row_count) {
  return on_cpu::fault_of(2, 101376, [&] {
    localq::rowlut_dequantize(*matrix, out, static_cast<localq::Type>(type), row_begin, row_count, 0, nullptr);
  });
}
