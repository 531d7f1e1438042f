// delta_prefill on a CPU: launcher and kernels (tests/kernels/test_delta_prefill_emulated.py puts the files together).
#include "facts_on_cpu.h"
#include "common/launch.h"
#include "delta/delta.h"

// What went wrong, or null; `counts`: accesses and conflicts of loads of matrices, then of stores.
extern "C" const char* delta_prefill_on_cpu(const localq::DeltaPass* pass, int type, int64_t* counts) {
  return on_cpu::counted(132, 0, counts,
                         [&] { localq::delta_prefill(*pass, static_cast<localq::Type>(type), 0, nullptr); });
}
extern "C" int64_t delta_chunk_bytes_on_cpu(int key_heads, int shared) {
  return localq::delta_chunk_bytes(key_heads, shared);
}
