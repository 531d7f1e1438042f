// out = NF4 weights in f16, bf16 or f32, bit for bit as bitsandbytes 0.50 gives them.
//   out_i = round(code_map[code_i] * absmax_{i/64})            product in f32, one rounding to the type of out
// Needs n % 64 == 0 and 16-byte aligned codes and out. A thread takes 4 bytes of codes = 8 neighbouring weights, so a
// warp reads 128 contiguous bytes and writes 512 (f16, bf16); kUnroll such loads are in flight while the tables are
// filled and before the first use.
// Bound: memory. Moves n * (1/2 + 1/64 + 4/16384 + sizeof(T)) bytes; the two tables are read from shared memory, the
// 16-entry one without bank conflicts (16 words, 16 banks; equal words are broadcast).
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "check.h"
#include "launchers.h"
#include "nf4.cuh"

namespace localq {
namespace {

constexpr int kThreads = 256;
constexpr int kWeightsPerThread = 8;
constexpr int kUnroll = 4;

// Eight values of type T, stored as one or two 16-byte words.
template <typename T>
struct alignas(16) Eight {
  T value[kWeightsPerThread];
};

__device__ __forceinline__ void convert(float from, __half& to) {
  to = __float2half_rn(from);
}
__device__ __forceinline__ void convert(float from, __nv_bfloat16& to) {
  to = __float2bfloat16_rn(from);
}
__device__ __forceinline__ void convert(float from, float& to) {
  to = from;
}

// Weight k of the word, k = 0..7 in order of columns: the high nibble of a byte comes first.
__device__ __forceinline__ uint32_t code_at(uint32_t word, int k) {
  return (word >> (8 * (k / 2) + (k % 2 ? 0 : 4))) & 15u;
}

template <typename T, bool kNested>
__global__ void __launch_bounds__(kThreads) nf4_dequantize_kernel(const Nf4 w,
                                                                  T* __restrict__ out,  // [n]
                                                                  int64_t words) {      // n / 8
  __shared__ float code_map[kCodes], nested_map[kNestedMapSize];
  const int64_t first = int64_t(blockIdx.x) * kThreads * kUnroll + threadIdx.x;
  const auto* codes = reinterpret_cast<const uint32_t*>(w.codes);
  uint32_t word[kUnroll];
  StoredAbsmax absmax[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t i = min(first + u * kThreads, words - 1);  // past the end: read the last one, written by nobody
    word[u] = __ldcs(codes + i);                             // read once: do not keep it in the cache
    absmax[u] = load_absmax<kNested>(w, i / (kBlock / kWeightsPerThread));
  }
  if (threadIdx.x < kCodes) code_map[threadIdx.x] = w.code_map[threadIdx.x];
  if (kNested) nested_map[threadIdx.x] = w.nested_map[threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t i = first + u * kThreads;
    if (i >= words) return;
    const float scale = decode_absmax<kNested>(absmax[u], nested_map, w.offset);
    Eight<T> eight;
#pragma unroll
    for (int k = 0; k < kWeightsPerThread; ++k) {
      convert(__fmul_rn(code_map[code_at(word[u], k)], scale), eight.value[k]);
    }
    reinterpret_cast<Eight<T>*>(out)[i] = eight;
  }
}

template <typename T>
void launch(const Nf4& w, void* out, int64_t n, cudaStream_t stream) {
  const int64_t words = n / kWeightsPerThread, per_block = kThreads * kUnroll;
  const int64_t blocks = (words + per_block - 1) / per_block;
  require(blocks <= INT32_MAX, "nf4_dequantize", "n", n, "is too large for one launch");
  auto* typed = static_cast<T*>(out);
  if (w.nested_absmax != nullptr) {
    nf4_dequantize_kernel<T, true><<<int(blocks), kThreads, 0, stream>>>(w, typed, words);
  } else {
    nf4_dequantize_kernel<T, false><<<int(blocks), kThreads, 0, stream>>>(w, typed, words);
  }
  check_cuda(cudaGetLastError(), "nf4_dequantize");
}

}  // namespace

void nf4_dequantize(const Nf4& w, void* out, Type type, int64_t n, int device, cudaStream_t stream) {
  constexpr const char* op = "nf4_dequantize";
  require(n > 0 && n % kBlock == 0, op, "n", n, "must be a positive multiple of 64");
  require_nf4(w, op);
  require_aligned(out, 16, op, "out");
  const DeviceGuard guard(device, op);
  switch (type) {
    case Type::kFloat16:
      return launch<__half>(w, out, n, stream);
    case Type::kBFloat16:
      return launch<__nv_bfloat16>(w, out, n, stream);
    case Type::kFloat32:
      return launch<float>(w, out, n, stream);
  }
  require(false, op, "dtype", static_cast<int>(type), "must be float16, bfloat16 or float32");
}

}  // namespace localq
