// out = weights in MXFP4 as f16, bf16 or f32, bit for bit localq/quant/mxfp4_codec.py:
//   out_i = round(value of code_i * 2 ^ (scale_{i/32} - 127))         product in f32, one rounding to the type of out
// `count` weights behind each other, in blocks of 32; 16-byte aligned out.
// A thread takes 4 bytes of codes = 8 weights, kUnroll times, all loaded before the first use, so that a warp reads 128
// bytes and writes 512. Bound: memory. Moves count * (1/2 + 1/32 + sizeof(T)) bytes.
#include <type_traits>

#include "common/check.h"
#include "common/gemv.cuh"
#include "common/launch.h"
#include "experts/experts.h"

namespace localq {
namespace {

constexpr const char* kOp = "mxfp4_dequantize";
constexpr int kThreads = 256, kUnroll = 4, kWeights = 8;

template <typename T>
__device__ __forceinline__ T rounded(float value) {
  T to;
  if constexpr (std::is_same<T, float>::value) {
    to = value;
  } else {
    round_to(value, to);
  }
  return to;
}

// The value of a code: sign, exponent and mantissa where f32 has them, with an exponent less by 126.
__device__ __forceinline__ float value_of(uint32_t code) {
  return __uint_as_float((code & 8u) << 28 | (code & 7u) << 22) * 0x1p126f;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    mxfp4_dequantize_kernel(const uint32_t* codes, const uint8_t* scales, T* out, int64_t words) {
  const int64_t begin = int64_t(blockIdx.x) * kThreads * kUnroll + threadIdx.x;
  uint32_t word[kUnroll], scale[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t i = min(begin + u * kThreads, words - 1);  // past the end: read the last one, written by nobody
    word[u] = __ldcs(codes + i);
    scale[u] = scales[i / 4];
  }
  dependency_wait();
  release_dependents();
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t i = begin + u * kThreads;
    if (i >= words) return;
    const float power = __uint_as_float(max(scale[u] << 23, 0x00400000u));  // byte 0 is the subnormal 2^-127
    Eight<T> eight;
#pragma unroll
    for (int k = 0; k < kWeights; ++k) eight.value[k] = rounded<T>(__fmul_rn(value_of(word[u] >> (4 * k)), power));
    reinterpret_cast<Eight<T>*>(out)[i] = eight;
  }
}

template <typename T>
void launch_typed(const uint8_t* codes, const uint8_t* scales, void* out, int64_t count, int device,
                  cudaStream_t stream) {
  const int64_t words = count / kWeights, blocks = (words + kThreads * kUnroll - 1) / (kThreads * kUnroll);
  require(blocks <= INT32_MAX, kOp, "count", count, "is too large for one launch");
  launch(kOp, device, mxfp4_dequantize_kernel<T>, dim3(unsigned(blocks)), dim3(kThreads), 0, stream,
         reinterpret_cast<const uint32_t*>(codes), scales, static_cast<T*>(out), words);
}

}  // namespace

void mxfp4_dequantize(const uint8_t* codes, const uint8_t* scales, void* out, Type type, int64_t count, int device,
                      cudaStream_t stream) {
  require(count > 0 && count % 32 == 0, kOp, "count", count, "must be a positive multiple of 32");
  require_aligned(codes, 4, kOp, "codes");
  require_aligned(scales, 1, kOp, "scales");
  require_aligned(out, 16, kOp, "out");
  const DeviceGuard guard(device, kOp);
  switch (type) {
    case Type::kFloat16:
      return launch_typed<__half>(codes, scales, out, count, device, stream);
    case Type::kBFloat16:
      return launch_typed<__nv_bfloat16>(codes, scales, out, count, device, stream);
    case Type::kFloat32:
      return launch_typed<float>(codes, scales, out, count, device, stream);
  }
  require(false, kOp, "dtype", static_cast<int>(type), "must be float16, bfloat16 or float32");
}

}  // namespace localq
