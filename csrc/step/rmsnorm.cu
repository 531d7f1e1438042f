// out = residual + x / sqrt(mean(x^2) + eps) * weight, row by row; residual may be null, and may be out.
//   x, residual, out  T [rows, width]     weight [width]: T (llama's order of rounding) or f32 (gemma's)
// Needs width % 8 == 0. One block per row; each thread keeps its own elements in shared memory between the two passes.
// Bound: memory. Reads x, weight and residual once, writes out; one row is bound by the latency of a launch.
// Sums in f32 in a fixed order: same input, same bits. The norm is rounded to T before the residual is added, as the
// modules do it.
#include "common/gemv.cuh"
#include "common/launch.h"
#include "step/rmsnorm.h"

namespace localq {

namespace {

constexpr const char* kOp = "rmsnorm";
constexpr int kThreads = 512;
constexpr int kScratchBytes = kThreads / 32 * sizeof(float);

template <typename T>
__global__ void __launch_bounds__(kThreads)
    rmsnorm_kernel(const T* x, GemvExtras extras, const T* residual, T* out, int width) {
  extern __shared__ __align__(16) unsigned char shared[];
  auto* row = reinterpret_cast<T*>(shared);
  auto* scratch = reinterpret_cast<float*>(row + width);  // all dynamic: launch() opts in to the most there is
  const int64_t begin = int64_t(blockIdx.x) * width;
  release_dependents();
  dependency_wait();
  stage_x(row, x + begin, width, extras, scratch);
  for (int i = threadIdx.x; i < width / 8; i += kThreads) {  // each thread what stage_x had it write
    Eight<T> eight = reinterpret_cast<const Eight<T>*>(row)[i];
    if (residual != nullptr) {
      const Eight<T> added = reinterpret_cast<const Eight<T>*>(residual + begin)[i];
#pragma unroll
      for (int k = 0; k < 8; ++k) round_to(to_float(added.value[k]) + to_float(eight.value[k]), eight.value[k]);
    }
    reinterpret_cast<Eight<T>*>(out + begin)[i] = eight;
  }
}

template <typename T>
void launch_rows(const void* x, const GemvExtras& extras, const void* residual, void* out, int64_t rows, int64_t width,
                 int device, cudaStream_t stream) {
  launch(kOp, device, rmsnorm_kernel<T>, dim3(unsigned(rows)), dim3(kThreads),
         size_t(width) * sizeof(T) + kScratchBytes, stream, static_cast<const T*>(x), extras,
         static_cast<const T*>(residual), static_cast<T*>(out), int(width));
}

}  // namespace

void rmsnorm(const void* x, NormKind kind, const void* weight, float eps, const void* residual, void* out, Type type,
             int64_t rows, int64_t width, int device, cudaStream_t stream) {
  require(rows >= 1 && rows < (int64_t(1) << 31), kOp, "rows", rows, "must be from 1 to 2^31 - 1");
  require(width >= 8 && width % 8 == 0, kOp, "width", width, "must be a positive multiple of 8");
  require(type != Type::kFloat32, kOp, "dtype", static_cast<int>(type), "must be float16 or bfloat16");
  require(kind != NormKind::kNone, kOp, "norm", 0, "must be plain or offset");
  require(width * 2 + kScratchBytes <= device_facts(device, kOp).shared_bytes_per_block, kOp, "width", width,
          "does not fit in shared memory");
  require_aligned(x, 16, kOp, "x");
  require_aligned(out, 16, kOp, "out");
  require_aligned(weight, kind == NormKind::kOffset ? 4 : 2, kOp, "weight");
  if (residual != nullptr) require_aligned(residual, 16, kOp, "residual");
  const DeviceGuard guard(device, kOp);
  GemvExtras extras = {};
  extras.norm = kind;
  extras.norm_weight = weight;
  extras.eps = eps;
  if (type == Type::kFloat16) {
    launch_rows<__half>(x, extras, residual, out, rows, width, device, stream);
  } else {
    launch_rows<__nv_bfloat16>(x, extras, residual, out, rows, width, device, stream);
  }
}

}  // namespace localq
