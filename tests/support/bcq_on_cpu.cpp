// bcq_gemv and bcq_dequantize on a CPU: launchers and kernels (tests/kernels/test_bcq_gemv_emulated.py puts the files
// together).
#include <stdexcept>
#include <type_traits>

#include "bcq_dequantize.cuh"
#include "bcq_kernel.cuh"
#include "facts_on_cpu.h"
#include "vq_plan.h"

namespace localq {

namespace bcq {

template <typename T, int kRows>
void run(const Arguments& p, const Plan& plan, const void* x, void* y) {
  on_cpu::block_threads = kThreads;
  const uint32_t need = shared_bytes<kRows>(p.tables, p.steps, p.x_stride, p.tiles) +
                        layer_bytes<kRows>(p, p.copies, p.x_stride, p.tiles);
  on_cpu::run_slices(plan.blocks, p.slices, plan.shared_bytes, need,
                     [&] { bcq_gemv_kernel<T, kRows>(p, static_cast<const T*>(x), y); });
}

template <typename T, int kRows>
void start(Arguments p, const Plan& plan, const void* x, void* y, int, cudaStream_t) {
  if constexpr (kRows > 2 && !std::is_same_v<T, __half>) {  // saves half of the time that this file takes to compile
    throw std::logic_error("more than two rows of bfloat16 are not compiled");
  } else {
    run<T, kRows>(p, plan, x, y);
  }
}
#define INSTANCE(ROWS)                                                                              \
  template void start<__half, ROWS>(Arguments, const Plan&, const void*, void*, int, cudaStream_t); \
  template void start<__nv_bfloat16, ROWS>(Arguments, const Plan&, const void*, void*, int, cudaStream_t)
INSTANCE(1);
INSTANCE(2);
INSTANCE(4);
INSTANCE(8);

}  // namespace bcq
}  // namespace localq

// What went wrong, or null; `counts`: accesses and conflicts of look-ups, then of stores.
extern "C" const char* bcq_gemv_on_cpu(const localq::BcqMatrix* matrices, int count, const void* fragments,
                                       const localq::GemvExtras* extras, const localq::VqWorkspace* workspace,
                                       const void* x, void* y, int type, int rows, int multiprocessors,
                                       int shared_bytes, int64_t* counts) {
  return on_cpu::counted(multiprocessors, shared_bytes, counts, [&] {
    localq::bcq_gemv(matrices, count, fragments, *extras, *workspace, x, y, static_cast<localq::Type>(type), rows, 0,
                     nullptr);
  });
}

extern "C" const char* bcq_dequantize_on_cpu(const localq::BcqMatrix* matrix, void* out, int type, int64_t row_begin,
                                             int64_t row_count) {
  return on_cpu::fault_of(
      [&] { localq::bcq_dequantize(*matrix, out, static_cast<localq::Type>(type), row_begin, row_count, 0, nullptr); });
}
