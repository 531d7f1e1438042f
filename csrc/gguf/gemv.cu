// y = extras(x W^T) for 1 to 8 rows of x, W in the blocks of a GGUF file, up to three matrices of one block type with
// the same x. x, bias and residual in f16 or bf16; sums in f32, rounded once. Needs out % 16 == 0. Deterministic: every
// sum has a fixed order and there are no atomics.
//
// A tile is 16 rows of W, the operand A of m16n8k16; column c of B is row c of x, so 1 to 8 rows cost nearly the same.
// Tiles are stored in the order in which they are read (layout.cuh). The items of the block's tiles, in memory order,
// are divided evenly among its warps (tile_shares.cuh). A warp copies its next two to four items to shared memory, the
// first before the kernel that produces x has ended, and multiplies the oldest.
//
// x is in shared memory in f16, scaled by a power of two (x.cuh), so that one kernel serves f16 and bf16. Codes are
// exact in f16, as are products of codes and integer scales; all other factors are applied to sums in f32. So no weight
// is rounded, unlike in the definition, whose weights of 16 bit are.
//
// Bound: memory. Reads each block once. If rows of x do not fit into shared memory together, they are multiplied in
// parts.
#include <type_traits>

#include "common/check.h"
#include "common/check_gemv.h"
#include "gguf/block_types.h"
#include "gguf/gemv_launch.h"
#include "gguf/gguf.h"

namespace localq {
namespace gguf {

extern template bool launch_gemv<Q4_0>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
extern template bool launch_gemv<Q4_1>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
extern template bool launch_gemv<Q5_0>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
extern template bool launch_gemv<Q5_1>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
extern template bool launch_gemv<Q8_0>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
extern template bool launch_gemv<Q2_K>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
extern template bool launch_gemv<Q3_K>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
extern template bool launch_gemv<Q4_K>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
extern template bool launch_gemv<Q5_K>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
extern template bool launch_gemv<Q6_K>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
extern template bool launch_gemv<IQ2_XXS>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
extern template bool launch_gemv<IQ2_XS>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
extern template bool launch_gemv<IQ2_S>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
extern template bool launch_gemv<IQ3_XXS>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
extern template bool launch_gemv<IQ3_S>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
extern template bool launch_gemv<IQ4_NL>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
extern template bool launch_gemv<IQ4_NLWithoutTable>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
extern template bool launch_gemv<IQ4_XS>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
extern template bool launch_gemv<IQ4_XSWithoutTable>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
extern template bool launch_gemv<IQ1_S>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
extern template bool launch_gemv<IQ1_M>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
extern template bool launch_gemv<TQ1_0>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
extern template bool launch_gemv<TQ2_0>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
extern template bool launch_gemv<NVFP4>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);

}  // namespace gguf

namespace {

using namespace gguf;

constexpr const char* kOp = "gguf_gemv";

using Launcher = bool (*)(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
struct Kernel {
  Launcher launch;
  int columns;  // of a block
};

// Without a table if it has no room beside x.
template <class Of>
bool launch_either(Arguments p, uint32_t units, const void* x, void* y, int device, cudaStream_t stream) {
  if (launch_gemv<typename Of::Block>(p, units, x, y, device, stream)) return true;
  if (std::is_same<typename Of::Block, typename Of::Narrow>::value) return false;
  return launch_gemv<typename Of::Narrow>(p, units, x, y, device, stream);
}

Kernel kernel_of(GgufType type) {
  return of_type(type, kOp, [](auto of) { return Kernel{launch_either<decltype(of)>, decltype(of)::Block::kColumns}; });
}

Segment segment_of(const GgufMatrix& w, const void* bias, uint32_t y_begin) {
  require(w.out >= kTileRows && w.out % kTileRows == 0, kOp, "out", w.out, "must be a positive multiple of 16");
  require(w.out <= 1 << 28, kOp, "out", w.out, "is too large");
  require_aligned(w.blocks, 16, kOp, "blocks");
  return {w.blocks, bias, uint32_t(w.out), uint32_t(w.out / kTileRows), y_begin, w.factor};
}

// Everything but rows and what depends on the block type; adds the units to `units`.
Arguments plan(const GgufMatrix* matrices, int count, const GemvExtras& extras, uint32_t& units) {
  Arguments p = {};
  p.extras = extras;
  p.places = matrices[0].places;
  p.in = uint32_t(matrices[0].in);
  p.parts = extras.activation == Activation::kNone ? 1 : 2;
  for (int i = 0; i < count; ++i) {
    p.segment[i] = segment_of(matrices[i], extras.bias[i], p.parts == 2 ? 0 : p.y_width);
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

void gguf_gemv(const GgufMatrix* matrices, int count, GgufType of, const GemvExtras& extras, const void* x, void* y,
               Type type, int rows, int device, cudaStream_t stream) {
  require(rows >= 1 && rows <= kMostRows, kOp, "rows", rows, "must be from 1 to 8");
  require(count >= 1 && count <= kMaxSegments, kOp, "matrices", count, "must be from 1 to 3");
  const Kernel kernel = kernel_of(of);
  const int64_t in = matrices[0].in;
  require(in > 0 && in % kernel.columns == 0, kOp, "in", in, "must be a positive multiple of the columns of a block");
  require(in <= 1 << 20, kOp, "in", in, "must be at most 2^20");
  require_aligned(x, 16, kOp, "x");
  require_aligned(y, extras.y_is_f32 ? 4 : 2, kOp, "y");
  require(type != Type::kFloat32, kOp, "dtype", static_cast<int>(type), "must be float16 or bfloat16");
  for (int i = 0; i < count; ++i) {
    require(matrices[i].factor == 1.f || of == GgufType::kNVFP4, kOp, "factor", i, "is not 1: only NVFP4 has one");
  }
  for (int i = 1; i < count; ++i) {
    require(matrices[i].in == in, kOp, "in", matrices[i].in, "must be that of the first matrix");
    require(matrices[i].places == matrices[0].places, kOp, "places", i, "are not those of the first matrix");
  }
  if (matrices[0].places != nullptr) {
    require(extras.norm == NormKind::kNone, kOp, "places", in, "cannot be used with a norm");
    require_aligned(matrices[0].places, 2, kOp, "places");
  }
  check_extras(kOp, count, matrices[0].out, matrices[count - 1].out, extras, rows);
  uint32_t units = 0;
  Arguments p = plan(matrices, count, extras, units);
  p.bf16 = type == Type::kBFloat16;
  const DeviceGuard guard(device, kOp);
  multiply_rows(kernel, p, units, static_cast<const uint8_t*>(x), static_cast<uint8_t*>(y), rows, device, stream);
}

}  // namespace localq
