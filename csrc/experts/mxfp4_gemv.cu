// y = extras(x W^T), W in MXFP4 (localq/formats/mxfp4): gemv.cuh with one to three matrices with the same x.
//   codes  u8 [out, in/2], even column = low nibble      x T [rows, in]
//   scales u8 [out, in/32], E8M0                         y T or f32 [rows, sum of outs]
// Needs in % 64 == 0; out is arbitrary. Codes become f16 exactly, x of bf16 becomes f16 times a power of two
// (activations.cuh). Bound: memory. Reads out*in*(1/2 + 1/32) bytes once, for 5 to 8 rows twice; if x is too wide for
// four rows in shared memory, once per two rows or per row.
#include "common/check_gemv.h"
#include "experts/experts.h"
#include "experts/gemv_kernel.cuh"
#include "experts/gemv_rows_kernel.cuh"

namespace localq {

void launch_mxfp4_blocks(const char* op, const BlockGemv& p, const void* x, void* y, Type type, int device,
                         cudaStream_t stream) {
  if (type == Type::kFloat16) {
    return launch_block_gemv<Mxfp4Blocks<__half>, __half>(op, p, x, y, device, stream);
  }
  launch_block_gemv<Mxfp4Blocks<__nv_bfloat16>, __nv_bfloat16>(op, p, x, y, device, stream);
}

namespace {

constexpr const char* kOp = "mxfp4_gemv";
constexpr int64_t kRest = 16 * 1024;  // shared memory beside x of several rows, at least

const uint8_t* after(const void* rows, int64_t bytes) {
  return static_cast<const uint8_t*>(rows) + bytes;
}

template <typename T>
void launch_rows(const BlockGemv& p, int rows, const void* x, void* y, int device, cudaStream_t stream) {
  if (rows <= 2) return launch_block_rows<T, 1>(kOp, p, rows, x, y, device, stream);
  launch_block_rows<T, 2>(kOp, p, rows, x, y, device, stream);
}

// The rows of x that a kernel takes and that fit into shared memory beside some partial sums: 4, 2 or 1.
int64_t rows_together(int64_t in, int rows, int64_t shared_bytes) {
  const int64_t fit = (shared_bytes - kRest) / (2 * (in + 512));
  return rows == 1 || fit < 2 ? 1 : fit >= 4 ? 4 : 2;
}

}  // namespace

void mxfp4_gemv(const Mxfp4Matrix* matrices, int count, const GemvExtras& extras, const void* x, void* y, Type type,
                int rows, int device, cudaStream_t stream) {
  require(count >= 1 && count <= kMaxSegments, kOp, "matrices", count, "must be from 1 to 3");
  require(rows >= 1 && rows <= 8, kOp, "rows", rows, "must be from 1 to 8");
  require(type != Type::kFloat32, kOp, "dtype", static_cast<int>(type), "must be float16 or bfloat16");
  const int64_t in = matrices[0].in;
  require(in >= 64 && in % 64 == 0, kOp, "in", in, "must be a positive multiple of 64");
  require(in <= 1 << 24, kOp, "in", in, "must be at most 2^24");
  require_aligned(x, 16, kOp, "x");
  require_aligned(y, extras.y_is_f32 ? 4 : 2, kOp, "y");
  const int64_t y_bytes = extras.y_is_f32 ? 4 : 2;
  BlockGemv p = {};
  p.extras = extras;
  p.kind = extras.activation == Activation::kNone ? BlockKind::kDense : BlockKind::kPair;
  int64_t outs[kMaxSegments] = {}, total = 0;
  for (int i = 0; i < count; ++i) {
    const Mxfp4Matrix& w = matrices[i];
    require(w.in == in, kOp, "in", w.in, "must be that of the first matrix");
    require(w.out >= 1 && w.out * (in / 32) < int64_t(1) << 32, kOp, "out", w.out,
            "must be positive, with out * in below 2^37");
    require_aligned(w.codes, 16, kOp, "codes");
    require_aligned(w.scales, 2, kOp, "scales");
    p.matrix[i] = {w.codes, w.scales, extras.bias[i], uint32_t(w.out)};
    outs[i] = w.out, total += w.out;
  }
  require(total <= 1 << 30, kOp, "out", total, "is too large");
  check_extras(kOp, count, outs[0], outs[count - 1], extras, rows);
  p.in = uint32_t(in);
  p.row_bytes = uint32_t(in / 2);
  p.results = uint32_t(p.kind == BlockKind::kPair ? outs[0] : total);
  const uint32_t width = p.kind == BlockKind::kPair ? kHalfTile : 2 * kHalfTile;
  p.units = (p.results + width - 1) / width;
  p.parts = p.x_rows = 1;
  p.early = true;
  const DeviceGuard guard(device, kOp);
  const int64_t most = rows_together(in, rows, device_facts(device, kOp).shared_bytes_per_block);
  for (int64_t row = 0; row < rows; row += most) {
    const int count = int(rows - row < most ? rows - row : most);
    BlockGemv part = p;
    if (extras.residual != nullptr) part.extras.residual = after(extras.residual, 2 * row * p.results);
    const void* const from = after(x, 2 * row * in);
    void* const to = const_cast<uint8_t*>(after(y, y_bytes * row * p.results));
    if (most == 1) {
      launch_mxfp4_blocks(kOp, part, from, to, type, device, stream);
    } else if (type == Type::kFloat16) {
      launch_rows<__half>(part, count, from, to, device, stream);
    } else {
      launch_rows<__nv_bfloat16>(part, count, from, to, device, stream);
    }
  }
}

}  // namespace localq
