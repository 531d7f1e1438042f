// gguf_gemv, gguf_dequantize and experts in GGUF blocks on a CPU (tests/formats/gguf puts the files together).
#include "common/launch.h"
#include "facts_on_cpu.h"
#include "gguf/experts.h"
#include "gguf/gguf.h"

// What went wrong, or null.
extern "C" const char* gguf_gemv_on_cpu(const localq::GgufMatrix* matrices, int count, int of,
                                        const localq::GemvExtras* extras, const void* x, void* y, int type, int rows,
                                        int multiprocessors, int shared_bytes) {
  return on_cpu::fault_of(multiprocessors, shared_bytes, [&] {
    localq::gguf_gemv(matrices, count, static_cast<localq::GgufType>(of), *extras, x, y,
                      static_cast<localq::Type>(type), rows, 0, nullptr);
  });
}

extern "C" const char* gguf_dequantize_on_cpu(const localq::GgufMatrix* matrix, int of, void* out, int type,
                                              int64_t row_begin, int64_t row_count) {
  return on_cpu::fault_of(1, 101376, [&] {
    localq::gguf_dequantize(*matrix, static_cast<localq::GgufType>(of), out, static_cast<localq::Type>(type), row_begin,
                            row_count, 0, nullptr);
  });
}

extern "C" const char* gguf_experts_gate_up_on_cpu(const localq::GgufExpertsGateUp* e, int gate, int up, int type,
                                                   int multiprocessors, int shared_bytes) {
  return on_cpu::fault_of(multiprocessors, shared_bytes, [&] {
    localq::gguf_experts_gate_up(*e, static_cast<localq::GgufType>(gate), static_cast<localq::GgufType>(up),
                                 static_cast<localq::Type>(type), 0, nullptr);
  });
}

extern "C" const char* gguf_experts_down_on_cpu(const localq::GgufExpertsDown* e, int of, int type, int multiprocessors,
                                                int shared_bytes) {
  return on_cpu::fault_of(multiprocessors, shared_bytes, [&] {
    localq::gguf_experts_down(*e, static_cast<localq::GgufType>(of), static_cast<localq::Type>(type), 0, nullptr);
  });
}
