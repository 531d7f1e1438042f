// How vq_gemv cuts a launch, without running it (tests/formats/codebooks/test_lookup_launch_geometry.py puts the files together).
#include "facts_on_cpu.h"
#include "lookup/gemv_plan.h"

static localq::VqWorkspace workspace;
static int64_t* taken;

namespace localq::vq {

struct Counted {
  static constexpr const char* kOp = "cut";
};

// slices, those of the first book alone, blocks of threads, columns of a slice at most, tables at a time, bytes of
// shared memory, words where slices meet; then for each number of slices what it is estimated to cost, by positions and
// with items, or 0: with all books in each, then with books apart
template <typename T, int kRows>
void start(Arguments p, const Plan& plan, const void*, void*, int, cudaStream_t) {
  const int64_t meeting = p.slices == 1 ? 0 : int64_t(plan.blocks) * p.tiles * kTile * kRows;
  const int64_t found[] = {p.slices, p.apart, plan.blocks, p.x_stride - kReach, p.tables, plan.shared_bytes, meeting};
  int64_t* to = std::copy(std::begin(found), std::end(found), taken);
  for (const bool apart : {false, true}) {
    for (uint32_t slices = 1; slices <= kMostSlices; ++slices) {
      const Columns columns = columns_of(p, slices, apart, positions_of_table<kRows>());
      const Cut cut = cut_of<Counted, kRows>(p, columns, workspace, 0);
      *to++ = cut.stripes == 0 ? 0 : int64_t(cut.cycles);
      *to++ = cut.stripes == 0 ? 0 : int64_t(cut.with_items);
    }
  }
}
#define INSTANCE(ROWS)                                                                              \
  template void start<__half, ROWS>(Arguments, const Plan&, const void*, void*, int, cudaStream_t); \
  template void start<__nv_bfloat16, ROWS>(Arguments, const Plan&, const void*, void*, int, cudaStream_t)
INSTANCE(1);
INSTANCE(2);
INSTANCE(4);
INSTANCE(8);

}  // namespace localq::vq

// What went wrong, or null. `count` matrices of `out` rows with books of these strides (0: no second one) that share
// their codewords; two of them are gate and up. 7 + 4 * 32 numbers to `cut`, as start() says.
extern "C" const char* vq_cut_on_cpu(int64_t out, int64_t in, int count, int first_stride, int second_stride, int rows,
                                     int multiprocessors, int shared_bytes, int64_t words, int64_t* cut) {
  workspace = {nullptr, words}, taken = cut;
  alignas(16) static uint8_t there[16];  // nothing is read: no pointer may be null
  localq::VqMatrix w = {};
  w.books = second_stride == 0 ? 1 : 2, w.out = out, w.in = in, w.factor = 1.f, w.scales = there;
  w.book[0] = {there, there, first_stride, 1, 0, in / first_stride};
  if (second_stride != 0) w.book[1] = {there, there, second_stride, 1, 0, in / second_stride};
  const localq::VqMatrix both[2] = {w, w};
  localq::GemvExtras extras = {};
  if (count == 2) extras.activation = localq::Activation::kSilu;
  return on_cpu::fault_of(multiprocessors, shared_bytes, [&] {
    localq::vq_gemv(both, count, extras, nullptr, workspace, there, there, localq::Type::kFloat16, rows, 0, nullptr);
  });
}
