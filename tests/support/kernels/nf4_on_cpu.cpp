// nf4_gemv on a CPU (tests/formats/nf4/test_kernel_emulated.py puts the files together).
#include "facts_on_cpu.h"
#include "common/launch.h"
#include "common/exchange.cuh"
#include "nf4/nf4.h"
#include "nf4/intrinsics.cuh"

// What went wrong, or null. All blocks run together: those of equal shares wait for each other. `reads`: the least and
// the most that a byte of codes was read, and the bytes that the warps of all blocks read, codes and absmax: the least
// and the most of a warp. `left`: words that blocks left for others.
extern "C" const char* nf4_gemv_on_cpu(const localq::Nf4* matrices, int count, const localq::GemvExtras* extras,
                                       const localq::Workspace* workspace, const void* x, void* y, int type, int rows,
                                       int multiprocessors, int shared_bytes, int64_t* reads, int64_t* left) {
  on_cpu::stored.clear(), on_cpu::left_words = 0;
  on_cpu::together = multiprocessors;
  std::fill(std::begin(on_cpu::bytes_of_warp), std::end(on_cpu::bytes_of_warp), 0);
  for (int i = 0; i < count; ++i) {
    const localq::Nf4& w = matrices[i];
    const int64_t absmax = w.out * w.in / 64 * (w.nested_absmax == nullptr ? sizeof(float) : 1);
    on_cpu::stored.push_back({static_cast<const uint8_t*>(w.absmax), std::vector<uint8_t>(absmax)});
    on_cpu::stored.push_back({w.codes, std::vector<uint8_t>(w.out * w.in / 2)});
  }
  const char* const fault = on_cpu::fault_of(multiprocessors, shared_bytes, [&] {
    localq::nf4_gemv(matrices, count, *extras, *workspace, x, y, static_cast<localq::Type>(type), rows, 0, nullptr);
  });
  *left = on_cpu::left_words;
  on_cpu::together = 1;  // other libraries of the process have the same variable
  reads[0] = 255, reads[1] = 0;
  for (int i = 0; i < count; ++i) {
    for (const uint8_t times : on_cpu::stored[2 * i + 1].reads) {
      reads[0] = std::min<int64_t>(reads[0], times), reads[1] = std::max<int64_t>(reads[1], times);
    }
  }
  reads[2] = *std::min_element(std::begin(on_cpu::bytes_of_warp), std::end(on_cpu::bytes_of_warp));
  reads[3] = *std::max_element(std::begin(on_cpu::bytes_of_warp), std::end(on_cpu::bytes_of_warp));
  return fault;
}

// The kernel and the blocks that a launch of one row in float16 would have; null where it fails. Nothing is read.
extern "C" const void* nf4_gemv_kernel_on_cpu(const localq::Nf4* matrices, int count, const localq::GemvExtras* extras,
                                              const localq::Workspace* workspace, int multiprocessors,
                                              int shared_bytes, int64_t* blocks) {
  on_cpu::Asked asked = {};
  on_cpu::asked = &asked;
  alignas(16) static uint8_t x[16];
  on_cpu::fault_of(multiprocessors, shared_bytes, [&] {
    localq::nf4_gemv(matrices, count, *extras, *workspace, x, x, localq::Type::kFloat16, 1, 0, nullptr);
  });
  on_cpu::asked = nullptr;
  *blocks = asked.blocks;
  return asked.kernel;
}
