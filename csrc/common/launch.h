// Kernel launches, with programmatic dependent launch on compute capability 9.0 and later: a kernel may start, fill its
// tables and prefetch weights while the previous one drains.
//
// Contract: every thread of every kernel calls dependency_wait() before it reads anything that an earlier kernel
// writes, and before it writes anything. Weights and tables that no kernel writes may be read earlier, and so may what
// the step before has written: a step begins with a launch (embed) that waits until all earlier work has ended.
// release_dependents() may be called at any point, because the next kernel's own wait covers all remaining work.
#pragma once

#include <cuda_runtime.h>

#include "common/check.h"

namespace localq {

__device__ __forceinline__ void dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void release_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

constexpr int kMostDevices = 64;

// Attributes of `device` that launchers need, cached.
struct DeviceFacts {
  int multiprocessors;
  int shared_bytes_per_block;  // maximum that a block can opt in to
  bool dependent_launch;
  bool clusters;               // thread block clusters with distributed shared memory
  int system_bytes_per_block;  // shared memory that the system reserves per block
};
const DeviceFacts& device_facts(int device, const char* op);

// Optional launch attributes. most_l1: sets the shared-memory carveout to what the launch needs, so that the rest is L1
// and more bytes of loads can be in flight.
struct LaunchWishes {
  int cluster = 1;  // blocks along x
  bool most_l1 = false;
  bool begins_step = false;  // starts when all earlier work has ended
};

// Launches `kernel` on `stream`; `arguments` are pointers to its argument values. Opts in to more than 48 KB of shared
// memory where needed.
void launch_any(const char* op, int device, const LaunchWishes& wishes, const void* kernel, dim3 grid, dim3 block,
                size_t shared_bytes, cudaStream_t stream, void** arguments);

// Typed front of launch_any: only the argument packing is instantiated per kernel, the rest is compiled once
// (device.cpp).
template <typename... Parameters, typename... Arguments>
void launch(const char* op, int device, const LaunchWishes& wishes, void (*kernel)(Parameters...), dim3 grid,
            dim3 block, size_t shared_bytes, cudaStream_t stream, Arguments... arguments) {
  [&](Parameters... values) {
    void* addresses[] = {const_cast<void*>(static_cast<const void*>(&values))...};
    launch_any(op, device, wishes, reinterpret_cast<const void*>(kernel), grid, block, shared_bytes, stream, addresses);
  }(static_cast<Parameters>(arguments)...);
}

// The same with default attributes.
template <typename... Parameters, typename... Arguments>
void launch(const char* op, int device, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
            cudaStream_t stream, Arguments... arguments) {
  launch(op, device, LaunchWishes(), kernel, grid, block, shared_bytes, stream, arguments...);
}

}  // namespace localq
