// In place of csrc/common/launch.h, over attention_machine_on_cpu.cuh: runs the clusters of a kernel one after the
// other, in an order that a test chooses, and says how many a device holds.
#pragma once

#include "attention/intrinsics.cuh"

#undef __global__
#define __global__ static

namespace on_cpu {

inline bool backwards = false;

}  // namespace on_cpu

extern "C" inline cudaError_t cudaOccupancyMaxActiveClusters(int* count, const void*, const cudaLaunchConfig_t*) {
  *count = 30;
  return cudaSuccess;
}

namespace localq {

struct LaunchWishes {
  int cluster = 1;
};

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int) {
  return cudaSuccess;
}

template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, Kernel, int, size_t) {
  *count = 2;
  return cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
void launch(const char*, int, const LaunchWishes& wishes, void (*kernel)(Parameters...), dim3 grid, dim3 block,
            size_t shared_bytes, cudaStream_t, Arguments... arguments) {
  if (grid.x % wishes.cluster != 0) __builtin_trap();
  on_cpu::blocks = grid.x * grid.y * grid.z, on_cpu::grid = {grid.x, grid.y, grid.z},
  on_cpu::block_threads = int(block.x);
  on_cpu::body = [&] { kernel(static_cast<Parameters>(arguments)...); };
  const uint32_t clusters = on_cpu::blocks / wishes.cluster;
  for (uint32_t i = 0; i < clusters; ++i) {
    on_cpu::barrier = {};
    on_cpu::barrier.all = int(block.x) * wishes.cluster;
    const uint32_t number = on_cpu::backwards ? clusters - 1 - i : i;
    on_cpu::run_together(number * wishes.cluster, wishes.cluster,
                         shared_bytes ? uint32_t(shared_bytes) : on_cpu::kSharedBytes);
  }
}

}  // namespace localq
