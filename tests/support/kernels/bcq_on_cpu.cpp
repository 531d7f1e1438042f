// bcq_gemv and bcq_dequantize on a CPU: launchers and kernels (tests/formats/bcq/test_kernel_emulated.py puts the files
// together).
#include <stdexcept>
#include <type_traits>

#include "bcq/dequantize_kernel.cuh"
#include "bcq/gemv_kernel.cuh"
#include "bcq/gemv_plan.h"
#include "facts_on_cpu.h"

namespace localq {

namespace bcq {

template <typename T, int kRows, Groups kGroups>
void run(const Arguments& p, const Plan& plan, const void* x, void* y) {
  on_cpu::block_threads = kThreads;
  const uint32_t need = shared_bytes<kRows>(p.tiles, p.chunk, p.split);
  on_cpu::run_slices(plan.blocks, 1, plan.shared_bytes, need,
                     [&] { bcq_gemv_kernel<T, kRows, kGroups>(p, static_cast<const T*>(x), y); });
}

template <typename T, int kRows>
void start(const Arguments& p, const Plan& plan, const void* x, void* y, int, cudaStream_t) {
  if constexpr (kRows > 2 && !std::is_same_v<T, __half>) {  // saves half of the time that this file takes to compile
    throw std::logic_error("more than two rows of bfloat16 are not compiled");
  } else if (p.word_shift < 31) {
    run<T, kRows, Groups::kWords>(p, plan, x, y);
  } else if (p.block_shift == 0) {
    run<T, kRows, Groups::kBlock>(p, plan, x, y);
  } else {
    run<T, kRows, Groups::kBlocks>(p, plan, x, y);
  }
}
#define INSTANCE(ROWS)                                                                              \
  template void start<__half, ROWS>(const Arguments&, const Plan&, const void*, void*, int, cudaStream_t); \
  template void start<__nv_bfloat16, ROWS>(const Arguments&, const Plan&, const void*, void*, int, cudaStream_t)
INSTANCE(1);
INSTANCE(2);
INSTANCE(4);
INSTANCE(8);

}  // namespace bcq
}  // namespace localq

// What went wrong, or null; `counts`: accesses and conflicts of loads of x, then of stores.
extern "C" const char* bcq_gemv_on_cpu(const localq::BcqMatrix* matrices, int count, const localq::GemvExtras* extras,
                                       const void* x, void* y, int type, int rows, int multiprocessors,
                                       int shared_bytes, int64_t* counts) {
  return on_cpu::counted(multiprocessors, shared_bytes, counts, [&] {
    localq::bcq_gemv(matrices, count, *extras, x, y, static_cast<localq::Type>(type), rows, 0, nullptr);
  });
}

extern "C" const char* bcq_dequantize_on_cpu(const localq::BcqMatrix* matrix, void* out, int type, int64_t row_begin,
                                             int64_t row_count) {
  return on_cpu::fault_of(
      [&] { localq::bcq_dequantize(*matrix, out, static_cast<localq::Type>(type), row_begin, row_count, 0, nullptr); });
}
