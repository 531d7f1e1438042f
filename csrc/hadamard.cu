// out = H (signs * x): the rotation of the inputs of vq2 (localq/quant/hadamard.py), bit for bit as it is defined
// there.
//   x, out T [rows, in], f16 or bf16     signs u8 [in / 8], bit i % 8 of byte i / 8 set where column i has a minus
// H is block-diagonal: the largest power of two that divides `in`, from 16 to 4096 columns, normalized. Butterflies of
// distances 1, 2, 4, .. in f32, then one product with 1 / sqrt(block), rounded once.
// Needs in % 16 == 0. A lane has 8 columns, of which one byte has the signs: distances below 8 are within it, below 256
// within its warp, the others meet in shared memory, where a thread takes the same column of every 256.
// Bound: latency. Reads and writes 2 bytes per element once.
#include <algorithm>
#include <cmath>

#include "gemv.cuh"
#include "hadamard.h"
#include "launch.h"

namespace localq {
namespace {

constexpr const char* kOp = "hadamard";
constexpr uint32_t kEach = 8;  // columns of a lane
constexpr uint32_t kWarpColumns = 32 * kEach;
constexpr uint32_t kLargest = 4096;      // LARGEST_BLOCK
constexpr uint32_t kSmallThreads = 128;  // of a block, where no two warps meet

__device__ __forceinline__ void butterfly(float& a, float& b) {
  const float sum = a + b;
  b = a - b;
  a = sum;
}

// Distances below kWarpColumns and below `block`, of the lane's eight columns.
__device__ __forceinline__ void turn_in_warp(float (&v)[kEach], uint32_t block) {
#pragma unroll
  for (uint32_t distance = 1; distance < kEach; distance *= 2) {
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      if ((i & distance) == 0) butterfly(v[i], v[i + distance]);
    }
  }
#pragma unroll
  for (uint32_t lanes = 1; lanes < 32; lanes *= 2) {
    if (lanes * kEach >= block) break;
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      const float other = __shfl_xor_sync(~0u, v[i], lanes);
      v[i] = threadIdx.x & lanes ? other - v[i] : v[i] + other;
    }
  }
}

// The distances that are left: column `at` of each kWarpColumns of the block.
__device__ __forceinline__ void turn_across(float (&v)[kLargest / kWarpColumns], uint32_t warps) {
#pragma unroll
  for (uint32_t distance = 1; distance < kLargest / kWarpColumns; distance *= 2) {
    if (distance >= warps) break;
#pragma unroll
    for (uint32_t i = 0; i < kLargest / kWarpColumns; ++i) {
      if ((i & distance) == 0) butterfly(v[i], v[i + distance]);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kLargest / kEach)
    hadamard_kernel(const T* x, const uint8_t* signs, T* out, uint32_t lanes, uint32_t in, uint32_t block,
                    float scale) {
  __shared__ float columns[kLargest];
  const uint32_t index = blockIdx.x * blockDim.x + threadIdx.x;  // of the lane
  const bool live = index < lanes;
  const uint32_t minus = live ? signs[index % (in / kEach)] : 0;
  release_dependents();
  dependency_wait();
  Eight<T> eight = {};
  if (live) eight = reinterpret_cast<const Eight<T>*>(x)[index];
  float v[kEach];
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i) v[i] = minus >> i & 1 ? -to_float(eight.value[i]) : to_float(eight.value[i]);
  turn_in_warp(v, block);
  if (block <= kWarpColumns) {
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) round_to(__fmul_rn(v[i], scale), eight.value[i]);
    if (live) reinterpret_cast<Eight<T>*>(out)[index] = eight;
    return;
  }
  auto* const mine = reinterpret_cast<float4*>(columns + threadIdx.x * kEach);
  mine[0] = make_float4(v[0], v[1], v[2], v[3]), mine[1] = make_float4(v[4], v[5], v[6], v[7]);
  __syncthreads();
  const uint32_t warps = block / kWarpColumns;
  T* const to = out + uint64_t(blockIdx.x) * block;
  for (uint32_t at = threadIdx.x; at < kWarpColumns; at += blockDim.x) {
    float far[kLargest / kWarpColumns];
#pragma unroll
    for (uint32_t w = 0; w < kLargest / kWarpColumns; ++w) far[w] = w < warps ? columns[w * kWarpColumns + at] : 0.f;
    turn_across(far, warps);
#pragma unroll
    for (uint32_t w = 0; w < kLargest / kWarpColumns; ++w) {
      if (w < warps) round_to(__fmul_rn(far[w], scale), to[w * kWarpColumns + at]);
    }
  }
}

template <typename T>
void launch_typed(const void* x, const uint8_t* signs, void* out, int64_t rows, int64_t in, int device,
                  cudaStream_t stream) {
  const uint32_t block = uint32_t(std::min<int64_t>(in & -in, kLargest)), lanes = uint32_t(rows * in / kEach);
  const uint32_t threads = block > kWarpColumns ? block / kEach : kSmallThreads;
  launch(kOp, device, hadamard_kernel<T>, (lanes + threads - 1) / threads, threads, 0, stream, static_cast<const T*>(x),
         signs, static_cast<T*>(out), lanes, uint32_t(in), block, float(1 / std::sqrt(double(block))));
}

}  // namespace

void hadamard(const void* x, const uint8_t* signs, void* out, Type type, int64_t rows, int64_t in, int device,
              cudaStream_t stream) {
  require(in >= 16 && in % 16 == 0, kOp, "in", in, "must be a positive multiple of 16");
  require(in <= 1 << 24, kOp, "in", in, "must be at most 2^24");
  require(rows >= 1 && rows <= (int64_t(1) << 31) / in, kOp, "rows", rows, "must be positive, and not too many");
  require(type != Type::kFloat32, kOp, "dtype", static_cast<int>(type), "must be float16 or bfloat16");
  require_aligned(x, 16, kOp, "x");
  require_aligned(out, 16, kOp, "out");
  require_aligned(signs, 1, kOp, "signs");
  const DeviceGuard guard(device, kOp);
  if (type == Type::kFloat16) return launch_typed<__half>(x, signs, out, rows, in, device, stream);
  launch_typed<__nv_bfloat16>(x, signs, out, rows, in, device, stream);
}

}  // namespace localq
