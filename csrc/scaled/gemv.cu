// y = extras(x W^T) for 1 to 8 rows of x, W in 4 or 8 bits with scales apart from the codes: NVFP4, FP8 with a scale
// per block or per row, integers of 8 bits with a scale and a zero point per group or a scale per row. Up to three
// matrices of one kind with the same x. x, bias and residual in f16 or bf16; sums in f32, rounded once. Needs out % 16
// == 0 and whole blocks of columns (kinds.cuh). Deterministic: every sum has a fixed order and there are no atomics.
//
// A tile is 16 rows of W, the operand A of m16n8k16; column c of B is row c of x, so 1 to 8 rows cost nearly the same.
// Tiles are stored in the order in which they are read (layout.cuh). The items of the block's tiles, in memory order,
// are divided evenly among its warps (tile_shares.cuh). A warp copies its next two to four items to shared memory,
// codes, scales and zero points each by cp.async, the first before the kernel that produces x has ended, and multiplies
// the oldest.
//
// x is in shared memory in f16, scaled by a power of two (gguf/x.cuh), so that one kernel serves f16 and bf16. Codes,
// less their zero points, are exact in f16, and so are codes of NVFP4 times the scale of their group; all other factors
// are applied to sums in f32. So no weight is rounded, unlike in the definitions, whose weights of 16 bit are.
//
// Bound: memory. Reads each code, scale and zero point once. If rows of x do not fit into shared memory together, they
// are multiplied in parts.
#include "common/check.h"
#include "common/check_gemv.h"
#include "scaled/gemv_launch.h"
#include "scaled/scaled.h"

namespace localq {
namespace {

using namespace scaled;

constexpr const char* kOp = "scaled_gemv";

using Launcher = bool (*)(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
struct Kernel {
  Launcher launch;
  int columns;  // of a tile block
  bool has_scales, has_zeros;
};

template <class Kind>
Kernel kernel_for() {
  return {launch_gemv<Kind>, Kind::kColumns, Kind::kScaleBytes != 0, Kind::kZeroBytes != 0};
}

Kernel kernel_of(ScaledKind kind) {
  switch (kind) {
    case ScaledKind::kNvfp4:
      return kernel_for<Nvfp4>();
    case ScaledKind::kFp8Blocks:
      return kernel_for<Fp8<true>>();
    case ScaledKind::kFp8Rows:
      return kernel_for<Fp8<false>>();
    case ScaledKind::kInt8Rows:
      return kernel_for<Int8Rows>();
    case ScaledKind::kInt8By32:
      return kernel_for<Int8Groups<32>>();
    case ScaledKind::kInt8By64:
      return kernel_for<Int8Groups<64>>();
    case ScaledKind::kInt8By128:
      return kernel_for<Int8Groups<128>>();
  }
  require(false, kOp, "kind", static_cast<int>(kind), "has no kernel");
  return {};
}

Segment segment_of(const Kernel& kernel, const ScaledMatrix& w, const void* bias, uint32_t y_begin) {
  require(w.out >= kTileRows && w.out % kTileRows == 0, kOp, "out", w.out, "must be a positive multiple of 16");
  require(w.out <= 1 << 28, kOp, "out", w.out, "is too large");
  require_aligned(w.codes, 16, kOp, "codes");
  if (kernel.has_scales) require_aligned(w.scales, 16, kOp, "scales");
  if (kernel.has_zeros) require_aligned(w.zeros, 16, kOp, "zeros");
  if (w.factors != nullptr) require_aligned(w.factors, 4, kOp, "factors");
  return {w.codes, w.scales,           w.zeros,  w.factors, bias, uint32_t(w.out), uint32_t(w.out / kTileRows),
          y_begin, w.by_row ? 1u : 0u, w.divides};
}

// Everything but rows and what depends on the kind; adds the units to `units`.
Arguments plan(const Kernel& kernel, const ScaledMatrix* matrices, int count, const GemvExtras& extras,
               uint32_t& units) {
  Arguments p = {};
  p.extras = extras;
  p.in = uint32_t(matrices[0].in);
  p.parts = extras.activation == Activation::kNone ? 1 : 2;
  for (int i = 0; i < count; ++i) {
    p.segment[i] = segment_of(kernel, matrices[i], extras.bias[i], p.parts == 2 ? 0 : p.y_width);
    if (p.parts == 2 && i == 1) break;
    units += p.segment[i].tiles;
    p.y_width += p.segment[i].out;
  }
  return p;
}

// `rows` rows of x at once if they fit into shared memory, else in halves.
void multiply_rows(const Kernel& kernel, Arguments p, uint32_t units, const uint8_t* x, uint8_t* y, int rows,
                   int device, cudaStream_t stream) {
  p.rows = rows;
  for (p.row_bits = 0; 1 << p.row_bits < rows;) ++p.row_bits;
  if (kernel.launch(p, units, x, y, device, stream)) return;
  require(rows > 1, kOp, "in", p.in, "is too large for the shared memory of this card");
  const int half = rows / 2;
  multiply_rows(kernel, p, units, x, y, half, device, stream);
  const uint64_t before = uint64_t(half) * p.y_width;
  if (p.extras.residual != nullptr) {
    p.extras.residual = static_cast<const uint8_t*>(p.extras.residual) + 2 * before;
  }
  multiply_rows(kernel, p, units, x + uint64_t(2) * half * p.in, y + (p.extras.y_is_f32 ? 4 : 2) * before, rows - half,
                device, stream);
}

}  // namespace

void scaled_gemv(const ScaledMatrix* matrices, int count, ScaledKind kind, const GemvExtras& extras, const void* x,
                 void* y, Type type, int rows, int device, cudaStream_t stream) {
  require(rows >= 1 && rows <= kMostRows, kOp, "rows", rows, "must be from 1 to 8");
  require(count >= 1 && count <= kMaxSegments, kOp, "matrices", count, "must be from 1 to 3");
  const Kernel kernel = kernel_of(kind);
  const int64_t in = matrices[0].in;
  require(in > 0 && in % kernel.columns == 0, kOp, "in", in, "must be a positive multiple of the columns of a block");
  require(in <= 1 << 20, kOp, "in", in, "must be at most 2^20");
  require_aligned(x, 16, kOp, "x");
  require_aligned(y, extras.y_is_f32 ? 4 : 2, kOp, "y");
  require(type != Type::kFloat32, kOp, "dtype", static_cast<int>(type), "must be float16 or bfloat16");
  for (int i = 1; i < count; ++i) {
    require(matrices[i].in == in, kOp, "in", matrices[i].in, "must be that of the first matrix");
  }
  check_extras(kOp, count, matrices[0].out, matrices[count - 1].out, extras, rows);
  uint32_t units = 0;
  Arguments p = plan(kernel, matrices, count, extras, units);
  p.bf16 = type == Type::kBFloat16;
  const DeviceGuard guard(device, kOp);
  multiply_rows(kernel, p, units, static_cast<const uint8_t*>(x), static_cast<uint8_t*>(y), rows, device, stream);
}

}  // namespace localq
