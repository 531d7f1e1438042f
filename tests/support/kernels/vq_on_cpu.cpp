// vq_gemv on a CPU: its launcher and its kernel (tests/formats/codebooks/test_lookup_kernel_emulated.py puts the files together).
#include "facts_on_cpu.h"
#include "lookup/gemv_kernel.cuh"
#include "lookup/gemv_launch.h"

namespace localq {

namespace vq {

template <typename T, int kRows>
void start(Arguments p, const Plan& plan, const void* x, void* y, int, cudaStream_t) {
  on_cpu::block_threads = kThreads;
  on_cpu::run_slices(plan.blocks, p.slices, plan.shared_bytes,
                     shared_bytes<kRows>(p.tables, p.steps, p.x_stride, p.tiles),
                     [&] { vq_gemv_kernel<T, kRows>(p, static_cast<const T*>(x), y); });
}
#define INSTANCE(ROWS)                                                                              \
  template void start<__half, ROWS>(Arguments, const Plan&, const void*, void*, int, cudaStream_t); \
  template void start<__nv_bfloat16, ROWS>(Arguments, const Plan&, const void*, void*, int, cudaStream_t)
INSTANCE(1);
INSTANCE(2);
INSTANCE(4);
INSTANCE(8);

}  // namespace vq
}  // namespace localq

// What went wrong, or null; `counts`: accesses and conflicts of look-ups, then of stores.
extern "C" const char* vq_gemv_on_cpu(const localq::VqMatrix* matrices, int count, const localq::GemvExtras* extras,
                                      const uint8_t* signs, const localq::VqWorkspace* workspace, const void* x,
                                      void* y, int type, int rows, int multiprocessors, int shared_bytes,
                                      int64_t* counts) {
  return on_cpu::counted(multiprocessors, shared_bytes, counts, [&] {
    localq::vq_gemv(matrices, count, *extras, signs, *workspace, x, y, static_cast<localq::Type>(type), rows, 0,
                    nullptr);
  });
}
