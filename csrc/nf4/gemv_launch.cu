// Launcher of the NF4 matrix-vector products: checks, tiling, and choice of the kernel by the number of rows.
#include "common/check_gemv.h"
#include "nf4/gemv_launch.h"

namespace localq {

namespace {

constexpr const char* kOp = "nf4_gemv";

Nf4Segment segment_of(const Nf4& w, const void* bias, uint32_t y_begin) {
  require(w.out >= 1, kOp, "out", w.out, "must be positive");
  require(w.out <= (1 << 30) && w.out * (w.in / kBlock) < (int64_t(1) << 31), kOp, "out", w.out, "is too large");
  require_nf4(w, kOp);
  return {w.codes, w.absmax, w.nested_absmax, bias, w.offset, uint32_t(w.out), uint32_t((w.out + kTile - 1) / kTile),
          y_begin, w.tiled};
}

Nf4Gemv plan(const Nf4* matrices, int count, const GemvExtras& extras) {
  Nf4Gemv p = {};
  p.extras = extras;
  p.code_map = matrices[0].code_map;
  p.nested_map = matrices[0].nested_absmax == nullptr ? nullptr : matrices[0].nested_map;
  p.blocks = uint32_t(matrices[0].in / kBlock);
  p.chunks = (p.blocks + kChunk - 1) / kChunk;
  p.parts = extras.activation == Activation::kNone ? 1 : 2;
  for (int i = 0; i < count; ++i) {
    p.segment[i] = segment_of(matrices[i], extras.bias[i], p.parts == 2 ? 0 : p.y_width);
    if (p.parts == 2 && i == 1) break;
    p.units += p.segment[i].tiles;
    p.y_width += p.segment[i].out;
  }
  return p;
}

}  // namespace

void nf4_gemv(const Nf4* matrices, int count, const GemvExtras& extras, const Workspace& workspace, const void* x,
              void* y, Type type, int rows, int device, cudaStream_t stream) {
  require(rows >= 1 && rows <= 8, kOp, "rows", rows, "must be from 1 to 8");
  require(count >= 1 && count <= kMaxSegments, kOp, "matrices", count, "must be from 1 to 3");
  const int64_t in = matrices[0].in;
  require(in >= kBlock && in % kBlock == 0, kOp, "in", in, "must be a positive multiple of 64");
  require(in <= 1 << 24, kOp, "in", in, "must be at most 2^24");
  require_aligned(x, 16, kOp, "x");
  require_aligned(y, extras.y_is_f32 ? 4 : 2, kOp, "y");
  require(type != Type::kFloat32, kOp, "dtype", static_cast<int>(type), "must be float16 or bfloat16");
  for (int i = 1; i < count; ++i) {
    require(matrices[i].in == in, kOp, "in", matrices[i].in, "must be that of the first matrix");
    require(matrices[i].nested_map == matrices[0].nested_map && matrices[i].code_map == matrices[0].code_map, kOp,
            "matrices", i, "does not share its tables with the first matrix");
    require(matrices[i].tiled == matrices[0].tiled, kOp, "matrices", i, "is not in the order of the first matrix");
  }
  check_extras(kOp, count, matrices[0].out, matrices[count - 1].out, extras, rows);
  if (workspace.words != 0) require_aligned(workspace.meeting, 16, kOp, "workspace");
  const Nf4Gemv p = plan(matrices, count, extras);
  const DeviceGuard guard(device, kOp);
  if (rows == 1) return nf4_gemv_row(p, workspace, x, y, type, matrices[0].tiled, device, stream);
  nf4_gemv_rows(p, x, y, type, rows, device, stream);
}

}  // namespace localq
