// y = extras(x W^T), W in 8 bits with one scale a row (localq/quant/int8.py): gemv_kernel.cuh with 8-bit weights.
//   codes  i8  [out, in], one to three that share x     x T [rows, in]
//   scales f32 [out]                                    y T or f32 [rows, sum of outs]
// Needs in % 16 == 0; out is free. 16 bytes of a row are 16 columns, so a step of a tile is 64 columns: four products,
// two loads of W, two of x. Codes become T exactly (every integer of 8 bits is one of both types), so the products are
// exact; the scale is applied to the sum.
// Bound: memory. Reads out*in + 4*out bytes once.
#include "common/mma.cuh"
#include "rows/gemv_kernel.cuh"
#include "rows/int8.h"

namespace localq {
namespace {

constexpr const char* kOp = "int8_gemv";

// Codes 0 and 1, and 2 and 3, of `word` as pairs of f16. 0x6400 | u is 1024 + u; u is the code + 128.
__device__ __forceinline__ void decode(uint32_t& even, uint32_t& odd, uint32_t word, __half) {
  const uint32_t shifted = word ^ 0x80808080u, offset = 0x64806480u;  // 1024 + 128, twice
  const uint32_t pairs[2] = {__byte_perm(shifted, 0x64646464u, 0x4140u), __byte_perm(shifted, 0x64646464u, 0x4342u)};
  uint32_t out[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const __half2 difference =
        __hsub2(reinterpret_cast<const __half2&>(pairs[i]), reinterpret_cast<const __half2&>(offset));
    out[i] = reinterpret_cast<const uint32_t&>(difference);
  }
  even = out[0], odd = out[1];
}

// The same in bf16, which has 7 bits behind the point: 0x4300 | (code & 127) is 128 + those bits, and 0x4300 | (code &
// 128) is 128, or 256 where the code is negative; their difference is the code.
__device__ __forceinline__ void decode(uint32_t& even, uint32_t& odd, uint32_t word, __nv_bfloat16) {
  const uint32_t pairs[2] = {__byte_perm(word, 0x43434343u, 0x4140u), __byte_perm(word, 0x43434343u, 0x4342u)};
  uint32_t out[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t bits = pairs[i] & 0xff7fff7fu, sign = pairs[i] & 0xff80ff80u;
    const __nv_bfloat162 difference =
        __hsub2(reinterpret_cast<const __nv_bfloat162&>(bits), reinterpret_cast<const __nv_bfloat162&>(sign));
    out[i] = reinterpret_cast<const uint32_t&>(difference);
  }
  even = out[0], odd = out[1];
}

template <typename T>
struct EightBits {
  static constexpr int kSteps = 6;  // loads of a row in an item; all of one item are in flight
  static constexpr int kItemBytes = kSteps * kStepBytes;
  static constexpr int kXWords = 2;      // 16-byte words of x to 16 bytes of a row of W
  static constexpr uint32_t kXPad = 16;  // bytes: lanes of two rows of x then meet no bank twice

  static __device__ __forceinline__ void multiply(float (&sum)[4], uint4 low, uint4 high, const uint4 (&x)[2]) {
    const uint32_t lows[4] = {low.x, low.y, low.z, low.w}, highs[4] = {high.x, high.y, high.z, high.w};
    const uint32_t b[4][2] = {{x[0].x, x[0].y}, {x[0].z, x[0].w}, {x[1].x, x[1].y}, {x[1].z, x[1].w}};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t a[4];
      decode(a[0], a[2], lows[i], T{});
      decode(a[1], a[3], highs[i], T{});
      mma(sum, a, b[i][0], b[i][1], T{});
    }
  }
};

}  // namespace

void int8_gemv(const Int8Matrix* matrices, int count, const GemvExtras& extras, const void* x, void* y, Type type,
               int rows, int device, cudaStream_t stream) {
  require(count >= 1 && count <= kMaxSegments, kOp, "matrices", count, "must be from 1 to 3");
  const int64_t in = matrices[0].in;
  require(in >= 16 && in % 16 == 0, kOp, "in", in, "must be a positive multiple of 16");
  require(in <= 1 << 24, kOp, "in", in, "must be at most 2^24");
  RowGemv p = {};
  int64_t outs[kMaxSegments] = {};
  for (int i = 0; i < count; ++i) {
    require(matrices[i].in == in, kOp, "in", matrices[i].in, "must be that of the first matrix");
    require_aligned(matrices[i].codes, 16, kOp, "codes");
    require_aligned(matrices[i].scales, 4, kOp, "scales");
    outs[i] = matrices[i].out;
    const auto* rows_of_codes = reinterpret_cast<const uint8_t*>(matrices[i].codes);
    p.segment[i] = {rows_of_codes, matrices[i].scales, extras.bias[i], uint32_t(outs[i])};
  }
  check_row_gemv(kOp, outs, count, extras, x, y, type, rows);
  p.extras = extras;
  p.in = uint32_t(in);
  p.row_bytes = uint32_t(in);
  p.rows = rows;
  const DeviceGuard guard(device, kOp);
  if (type == Type::kFloat16) return launch_row_gemv<__half, EightBits<__half>>(kOp, p, count, x, y, device, stream);
  launch_row_gemv<__nv_bfloat16, EightBits<__nv_bfloat16>>(kOp, p, count, x, y, device, stream);
}

}  // namespace localq
