// y = extras(x W^T), W in f16 or bf16 as checkpoints have it: gemv_kernel.cuh with 16-bit weights.
//   W  T [out, in], one to three that share x     x T [rows, in]     y T or f32 [rows, sum of outs]
// Needs in % 8 == 0; out is free. 16 bytes of a row are 8 columns, so a step of a tile is 32 columns: two products, two
// loads of W, one of x.
// Bound: memory. Reads 2*out*in bytes once.
#include "common/mma.cuh"
#include "rows/dense.h"
#include "rows/gemv_kernel.cuh"

namespace localq {
namespace {

constexpr const char* kOp = "dense_gemv";

template <typename T>
struct SixteenBits {
  static constexpr int kSteps = 8;  // loads of a row in an item; all of one item are in flight
  static constexpr int kItemBytes = kSteps * kStepBytes;
  static constexpr int kXWords = 1;      // 16-byte words of x to 16 bytes of a row of W
  static constexpr uint32_t kXPad = 64;  // bytes: lanes of two rows of x then meet no bank twice

  static __device__ __forceinline__ void multiply(float (&sum)[4], uint4 low, uint4 high, const uint4 (&x)[1]) {
    const uint32_t a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
    mma(sum, a[0], x[0].x, x[0].y, T{});
    mma(sum, a[1], x[0].z, x[0].w, T{});
  }
};

}  // namespace

void dense_gemv(const DenseMatrix* matrices, int count, const GemvExtras& extras, const void* x, void* y, Type type,
                int rows, int device, cudaStream_t stream) {
  require(count >= 1 && count <= kMaxSegments, kOp, "matrices", count, "must be from 1 to 3");
  const int64_t in = matrices[0].in;
  require(in >= 8 && in % 8 == 0, kOp, "in", in, "must be a positive multiple of 8");
  require(in <= 1 << 24, kOp, "in", in, "must be at most 2^24");
  RowGemv p = {};
  int64_t outs[kMaxSegments] = {};
  for (int i = 0; i < count; ++i) {
    require(matrices[i].in == in, kOp, "in", matrices[i].in, "must be that of the first matrix");
    require_aligned(matrices[i].weights, 16, kOp, "weights");
    outs[i] = matrices[i].out;
    p.segment[i] = {static_cast<const uint8_t*>(matrices[i].weights), nullptr, extras.bias[i], uint32_t(outs[i])};
  }
  check_row_gemv(kOp, outs, count, extras, x, y, type, rows);
  p.extras = extras;
  p.in = uint32_t(in);
  p.row_bytes = uint32_t(2 * in);
  p.rows = rows;
  const DeviceGuard guard(device, kOp);
  if (type == Type::kFloat16) {
    return launch_row_gemv<__half, SixteenBits<__half>>(kOp, p, count, x, y, device, stream);
  }
  launch_row_gemv<__nv_bfloat16, SixteenBits<__nv_bfloat16>>(kOp, p, count, x, y, device, stream);
}

}  // namespace localq
