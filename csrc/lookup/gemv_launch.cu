// Launcher of vq_gemv: checks and arguments; gemv_plan.h plans the launch.
#include <algorithm>

#include "lookup/gemv_plan.h"

namespace localq {
namespace vq {
namespace {

struct VqKernels {
  static constexpr const char* kOp = vq::kOp;
  template <typename T, int kRows, typename... Given>
  static void start(const Given&... given) {
    vq::start<T, kRows>(given...);
  }
};

void check_matrix(const VqMatrix& w, const VqMatrix& first) {
  require(w.out >= 1, kOp, "out", w.out, "must be positive");
  require(w.in == first.in, kOp, "in", w.in, "must be that of the first matrix");
  require(w.books == first.books, kOp, "books", w.books, "must be those of the first matrix");
  require(w.scales_bf16 == first.scales_bf16, kOp, "scales_bf16", w.scales_bf16, "must be that of the first matrix");
  require_aligned(w.scales, 2, kOp, "scales");
  for (int b = 0; b < w.books; ++b) {
    const VqBook& book = w.book[b];
    check_sizes(kOp, book, w.in);
    const VqBook& other = first.book[b];
    require(book.stride == other.stride && book.steps == other.steps && book.before == other.before &&
                book.tile_positions == other.tile_positions,
            kOp, "book", b, "must be like that of the first matrix");
    require_aligned(book.codes, 16, kOp, "codes");
    require_aligned(book.fragments, 16, kOp, "fragments");
  }
}

Arguments arguments_of(const VqMatrix* matrices, int count, const GemvExtras& extras) {
  Arguments p = {};
  p.slots = p.met = 1;
  p.extras = extras;
  p.parts = extras.activation == Activation::kNone ? 1 : 2;
  p.scales_bf16 = matrices[0].scales_bf16;
  add_books(p, matrices[0]);
  for (int i = 0; i < count; ++i) {
    const VqMatrix& w = matrices[i];
    const bool second = p.parts == 2 && i == 1;
    p.segment[i] = {{},
                    {},
                    w.scales,
                    extras.bias[i],
                    w.factor,
                    uint32_t(w.out),
                    ceil_div(uint32_t(w.out), kTile),
                    second ? 0 : p.y_width};
    bool shared = i > 0;
    for (int b = 0; b < w.books; ++b) {
      p.segment[i].codes[b] = w.book[b].codes;
      p.segment[i].fragments[b] = static_cast<const uint4*>(w.book[b].fragments);
      shared = shared && w.book[b].fragments == matrices[i - 1].book[b].fragments;
    }
    if (!second) p.units += p.segment[i].tiles, p.y_width += p.segment[i].out;
    if (!shared) ++p.runs;
    p.run_end[p.runs - 1] = p.units;
  }
  return p;
}

}  // namespace
}  // namespace vq

void vq_gemv(const VqMatrix* matrices, int count, const GemvExtras& extras, const uint8_t* signs,
             const VqWorkspace& workspace, const void* x, void* y, Type type, int rows, int device,
             cudaStream_t stream) {
  using vq::kOp;
  require(rows >= 1 && rows <= 8, kOp, "rows", rows, "must be from 1 to 8");
  require(count >= 1 && count <= kMaxSegments, kOp, "matrices", count, "must be from 1 to 3");
  const VqMatrix& first = matrices[0];
  require(first.in >= 8 && first.in % 8 == 0, kOp, "in", first.in, "must be a positive multiple of 8");
  require(first.in <= 1 << 24, kOp, "in", first.in, "must be at most 2^24");
  require(first.books == 1 || first.books == kMaxBooks, kOp, "books", first.books, "must be 1 or 2");
  require(type != Type::kFloat32, kOp, "dtype", static_cast<int>(type), "must be float16 or bfloat16");
  require_aligned(x, 16, kOp, "x");
  require_aligned(y, extras.y_is_f32 ? 4 : 2, kOp, "y");
  int64_t total = 0;
  for (int i = 0; i < count; ++i) {
    vq::check_matrix(matrices[i], first);
    total += matrices[i].out;
  }
  require(total <= 1 << 24, kOp, "out", total, "is too large");
  check_extras(vq::kOp, count, first.out, matrices[count - 1].out, extras, rows);
  vq::Arguments p = vq::arguments_of(matrices, count, extras);
  vq::add_rotation(kOp, p, signs, rows);
  const DeviceGuard guard(device, kOp);
  if (type == Type::kFloat16) {
    return vq::launch_typed<vq::VqKernels>(p, workspace, static_cast<const __half*>(x), y, rows, device, stream);
  }
  vq::launch_typed<vq::VqKernels>(p, workspace, static_cast<const __nv_bfloat16*>(x), y, rows, device, stream);
}

}  // namespace localq
