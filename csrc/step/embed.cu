// out = table[ids] * scale, one row per id; the product is rounded to T, a scale of 1 leaves the bits unchanged.
//   ids i64 [rows]     table T [vocab, hidden]     out T [rows, hidden]
// The table is on the device or in pinned host memory, which the kernel reads at its host address: a row of 16 KB takes
// less than a microsecond of PCIe bandwidth after the latency of one access, because all its loads are in flight at
// once. Needs hidden % 8 == 0. Blocks of 128 threads, 16 bytes per thread; blockIdx.y is the row. Bound: latency for
// one row.
#include "common/gemv.cuh"
#include "common/launch.h"
#include "step/embed.h"

namespace localq {

namespace {

constexpr const char* kOp = "embed";
constexpr int kThreads = 128;

template <typename T>
__global__ void __launch_bounds__(kThreads)
    embed_kernel(const int64_t* ids, const T* table, float scale, T* out, int hidden) {
  release_dependents();
  dependency_wait();
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= hidden / 8) return;  // no barrier follows
  const int64_t row = blockIdx.y;
  Eight<T> eight = reinterpret_cast<const Eight<T>*>(table + __ldcg(ids + row) * hidden)[i];
  if (scale != 1.f) {
#pragma unroll
    for (int k = 0; k < 8; ++k) round_to(to_float(eight.value[k]) * scale, eight.value[k]);
  }
  reinterpret_cast<Eight<T>*>(out + row * hidden)[i] = eight;
}

template <typename T>
void launch_rows(const int64_t* ids, const void* table, float scale, void* out, int64_t rows, int64_t hidden,
                 int device, cudaStream_t stream) {
  const dim3 grid(unsigned((hidden / 8 + kThreads - 1) / kThreads), unsigned(rows));
  LaunchWishes wishes;
  wishes.begins_step = true;  // later launches read early what the step before has written (launch.h)
  launch(kOp, device, wishes, embed_kernel<T>, grid, dim3(kThreads), 0, stream, ids, static_cast<const T*>(table),
         scale, static_cast<T*>(out), int(hidden));
}

}  // namespace

void embed(const int64_t* ids, const void* table, float scale, void* out, Type type, int64_t rows, int64_t hidden,
           int device, cudaStream_t stream) {
  require(rows >= 1 && rows <= 65535, kOp, "rows", rows, "must be from 1 to 65535");
  require(hidden >= 8 && hidden % 8 == 0, kOp, "hidden", hidden, "must be a positive multiple of 8");
  require(type != Type::kFloat32, kOp, "dtype", static_cast<int>(type), "must be float16 or bfloat16");
  require_aligned(ids, 8, kOp, "ids");
  require_aligned(table, 16, kOp, "table");
  require_aligned(out, 16, kOp, "out");
  const DeviceGuard guard(device, kOp);
  if (type == Type::kFloat16) {
    launch_rows<__half>(ids, table, scale, out, rows, hidden, device, stream);
  } else {
    launch_rows<__nv_bfloat16>(ids, table, scale, out, rows, hidden, device, stream);
  }
}

}  // namespace localq
