// The roof of products that gather: how fast this device reads random sectors of a table that its L2 cache holds.
//   table  [bytes], a power of two of steps of 16 or 32 bytes        sums  u32 [threads]
// Every thread asks for 16 bytes at random steps, 16 of them before it uses the first, and draws their places itself:
// no codes are read, nothing is multiplied. At steps of 16 bytes half of every sector is asked for, as codewords of 8
// values lie; at steps of 32 the begin of whole ones. 32 bytes of L2 each way, past L1.
#include "common/check.h"
#include "common/launch.h"
#include "gather/gemv.h"

namespace localq {
namespace {

constexpr const char* kOp = "gather_roof";
constexpr int kThreads = 256, kInFlight = 16;

__device__ __forceinline__ uint4 load(const uint8_t* at) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at));
  return v;
}

__global__ void __launch_bounds__(kThreads, 4) gather_roof_kernel(const uint8_t* __restrict__ table,
                                                                  int bits,   // of the number of a step
                                                                  int shift,  // a step has 2^shift bytes
                                                                  int rounds, uint32_t* __restrict__ sums) {
  release_dependents();
  dependency_wait();
  const uint32_t thread = blockIdx.x * kThreads + threadIdx.x;
  uint32_t state = (thread + 1) * 2654435769u, sum = 0;
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    uint4 ring[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      state = state * 1664525u + 1013904223u;  // its upper bits are the random ones
      ring[i] = load(table + (state >> (32 - bits) << shift));
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) sum ^= ring[i].x ^ ring[i].y ^ ring[i].z ^ ring[i].w;
  }
  sums[thread] = sum;
}

}  // namespace

void gather_roof(const void* table, int64_t bytes, int step, int loads, int64_t threads, uint32_t* sums, int device,
                 cudaStream_t stream) {
  require(step == 16 || step == 32, kOp, "step", step, "must be 16 or 32");
  const int64_t steps = bytes / step;
  require(steps >= 2 && steps <= 1 << 30 && (steps & (steps - 1)) == 0 && steps * step == bytes, kOp, "bytes", bytes,
          "must be a power of two of steps");
  require(loads >= kInFlight && loads % kInFlight == 0, kOp, "loads", loads, "must be a positive multiple of 16");
  require(threads >= kThreads && threads % kThreads == 0 && threads <= 1 << 30, kOp, "threads", threads,
          "must be a positive multiple of 256");
  require_aligned(table, 32, kOp, "table");
  require_aligned(sums, 4, kOp, "sums");
  int bits = 0;
  while (int64_t(1) << bits < steps) ++bits;
  const DeviceGuard guard(device, kOp);
  launch(kOp, device, gather_roof_kernel, dim3(unsigned(threads / kThreads)), kThreads, 0, stream,
         static_cast<const uint8_t*>(table), bits, step == 16 ? 4 : 5, loads / kInFlight, sums);
}

}  // namespace localq
