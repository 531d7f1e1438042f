// out = H (signs * x): the rotation of the inputs of vq2 (localq/quant/hadamard.py), bit for bit as it is defined
// there, for many rows of x; the products of one row rotate it themselves (rotation.cuh).
//   x, out T [rows, in], f16 or bf16     signs u8 [in / 8], bit i % 8 of byte i / 8 set where column i has a minus
// H is block-diagonal: the largest power of two that divides `in`, from 16 to 4096 columns, normalized (hadamard.cuh).
// Needs in % 16 == 0. Bound: latency. Reads and writes 2 bytes per element once.
#include "common/launch.h"
#include "lookup/hadamard.cuh"
#include "lookup/hadamard.h"

namespace localq {
namespace {

constexpr const char* kOp = "hadamard";
constexpr uint32_t kSmallThreads = 128;  // of a block, where no two warps meet

// The distances from kWarpColumns on of blocks of `warps` times kWarpColumns: v is a column of each kWarpColumns.
__device__ __forceinline__ void turn_across(float (&v)[kWarpsOfBlock], uint32_t warps) {
#pragma unroll
  for (uint32_t distance = 1; distance < kWarpsOfBlock; distance *= 2) {
    if (distance >= warps) break;
#pragma unroll
    for (uint32_t i = 0; i < kWarpsOfBlock; ++i) {
      if ((i & distance) == 0) butterfly(v[i], v[i + distance]);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kLargestBlock / kLaneColumns)
    hadamard_kernel(const T* x, const uint8_t* signs, T* out, uint32_t lanes, uint32_t in, uint32_t block,
                    float scale) {
  __shared__ float columns[kLargestBlock];
  const uint32_t index = blockIdx.x * blockDim.x + threadIdx.x;  // of the lane
  const bool live = index < lanes;
  const uint32_t minus = live ? signs[index % (in / kLaneColumns)] : 0;
  release_dependents();
  dependency_wait();
  Eight<T> eight = {};
  if (live) eight = reinterpret_cast<const Eight<T>*>(x)[index];
  float v[kLaneColumns];
  take_signs(v, eight, minus);
  turn_in_warp(v, block);
  if (block <= kWarpColumns) {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t column = index / 32 * kWarpColumns + place_in_warp(half);
      if (column < lanes * kLaneColumns) *reinterpret_cast<Four<T>*>(out + column) = rounded_half<T>(v, half, scale);
    }
    return;
  }
  put_half(columns + threadIdx.x / 32 * kWarpColumns, v, 0);
  put_half(columns + threadIdx.x / 32 * kWarpColumns, v, 1);
  __syncthreads();
  const uint32_t warps = block / kWarpColumns;
  T* const to = out + uint64_t(blockIdx.x) * block;
  for (uint32_t at = threadIdx.x; at < kWarpColumns; at += blockDim.x) {
    float far[kWarpsOfBlock];
#pragma unroll
    for (uint32_t w = 0; w < kWarpsOfBlock; ++w) far[w] = w < warps ? columns[w * kWarpColumns + at] : 0.f;
    turn_across(far, warps);
#pragma unroll
    for (uint32_t w = 0; w < kWarpsOfBlock; ++w) {
      if (w < warps) round_to(__fmul_rn(far[w], scale), to[w * kWarpColumns + at]);
    }
  }
}

template <typename T>
void launch_typed(const void* x, const uint8_t* signs, void* out, int64_t rows, int64_t in, int device,
                  cudaStream_t stream) {
  const uint32_t block = hadamard_block(in), lanes = uint32_t(rows * in / kLaneColumns);
  const uint32_t threads = block > kWarpColumns ? block / kLaneColumns : kSmallThreads;
  launch(kOp, device, hadamard_kernel<T>, (lanes + threads - 1) / threads, threads, 0, stream, static_cast<const T*>(x),
         signs, static_cast<T*>(out), lanes, uint32_t(in), block, hadamard_scale(block));
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
