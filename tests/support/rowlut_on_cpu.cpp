// rowlut_gemv and rowlut_dequantize on a CPU (tests/kernels/test_rowlut_emulated.py puts the files together).
#include "launch.h"
#include "rowlut.h"

static localq::DeviceFacts facts;

const localq::DeviceFacts& localq::device_facts(int, const char*) {
  return facts;
}

namespace {

static std::string said;

// What went wrong, or null.
template <typename Run>
const char* told(Run run) {
  try {
    run();
  } catch (const std::exception& error) {
    said = error.what();
    return said.c_str();
  }
  return nullptr;
}

}  // namespace

extern "C" const char* rowlut_gemv_on_cpu(const localq::RowLut* matrices, int count, const localq::GemvExtras* extras,
                                          const void* x, void* y, int type, int rows, int multiprocessors,
                                          int shared_bytes, int64_t* counts) {
  facts = {multiprocessors, shared_bytes, true, true};
  on_cpu::lookups = {};
  const char* const fault = told(
      [&] { localq::rowlut_gemv(matrices, count, *extras, x, y, static_cast<localq::Type>(type), rows, 0, nullptr); });
  counts[0] = on_cpu::lookups.accesses, counts[1] = on_cpu::lookups.conflicts;
  return fault;
}

extern "C" const char* rowlut_dequantize_on_cpu(const localq::RowLut* matrix, void* out, int type, int64_t row_begin,
                                                int64_t row_count) {
  facts = {2, 101376, true, true};
  return told([&] {
    localq::rowlut_dequantize(*matrix, out, static_cast<localq::Type>(type), row_begin, row_count, 0, nullptr);
  });
}

extern "C" int64_t rowlut_widest_on_cpu(int shared_bytes) {
  facts = {2, shared_bytes, true, true};
  return localq::rowlut_widest(0);
}
