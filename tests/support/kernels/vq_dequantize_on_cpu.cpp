// vq_dequantize on a CPU (tests/formats/codebooks/test_dequantize_kernel.py puts the files together).
#include "facts_on_cpu.h"
#include "common/launch.h"
#include "lookup/dequantize.h"

// What went wrong, or null; `counts`: accesses and conflicts of look-ups, then of stores.
extern "C" const char* vq_dequantize_on_cpu(const localq::TiledMatrix* matrix, int stored, void* out, int type,
                                            int64_t row_begin, int64_t row_count, int multiprocessors, int shared_bytes,
                                            int64_t* counts) {
  return on_cpu::counted(multiprocessors, shared_bytes, counts, [&] {
    localq::vq_dequantize(*matrix, static_cast<localq::Type>(stored), out, static_cast<localq::Type>(type), row_begin,
                          row_count, 0, nullptr);
  });
}
