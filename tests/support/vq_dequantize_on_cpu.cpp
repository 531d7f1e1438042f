// vq_dequantize on a CPU (tests/kernels/test_vq_dequantize.py puts the files together).
#include "launch.h"
#include "vq_dequantize.h"

static localq::DeviceFacts facts;

const localq::DeviceFacts& localq::device_facts(int, const char*) {
  return facts;
}

// What went wrong, or null; `counts`: accesses and conflicts of look-ups, then of stores.
extern "C" const char* vq_dequantize_on_cpu(const localq::TiledMatrix* matrix, int stored, void* out, int type,
                                            int64_t row_begin, int64_t row_count, int multiprocessors, int shared_bytes,
                                            int64_t* counts) {
  static std::string said;
  facts = {multiprocessors, shared_bytes, true, true};
  on_cpu::lookups = on_cpu::stores = {};
  try {
    localq::vq_dequantize(*matrix, static_cast<localq::Type>(stored), out, static_cast<localq::Type>(type), row_begin,
                          row_count, 0, nullptr);
  } catch (const std::exception& error) {
    said = error.what();
    return said.c_str();
  }
  const on_cpu::Count of[2] = {on_cpu::lookups, on_cpu::stores};
  for (int i = 0; i < 2; ++i) counts[2 * i] = of[i].accesses, counts[2 * i + 1] = of[i].conflicts;
  return nullptr;
}
