// How every kernel is launched: with programmatic dependent launch where the device has it (compute capability 9.0 and
// later), so that a kernel may start, fill its tables and prefetch weights while the one before it drains.
//
// The contract that makes this safe: every thread of every kernel calls dependency_wait() before it reads anything that
// an earlier kernel wrote and before it writes anything at all. Weights and tables that no kernel writes may be read
// before. release_dependents() may be called at any point: the next kernel's own wait covers all that is still to come.
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

// Facts about `device` that launchers need; asked once per device.
struct DeviceFacts {
  int multiprocessors;
  int shared_bytes_per_block;  // the most that a block may opt in to
  bool dependent_launch;
  bool clusters;               // of blocks that reach each other's shared memory
  int system_bytes_per_block;  // of shared memory, that a block has besides
};
const DeviceFacts& device_facts(int device, const char* op);

// What a launch wants besides its blocks. most_l1: no more shared memory than it asks for, where the kernel before it
// had more: what is left is L1, and as many bytes of loads as that has can be under way.
struct LaunchWishes {
  int cluster = 1;  // blocks along x
  bool most_l1 = false;
};

// Launches the kernel at `kernel` on `stream`, with the values that `arguments` point to. More than 48 KB of shared
// memory is opted in to here.
void launch_any(const char* op, int device, const LaunchWishes& wishes, const void* kernel, dim3 grid, dim3 block,
                size_t shared_bytes, cudaStream_t stream, void** arguments);

// The same by types: what differs between kernels is compiled with each of them, the rest once (device.cpp).
template <typename... Parameters, typename... Arguments>
void launch(const char* op, int device, const LaunchWishes& wishes, void (*kernel)(Parameters...), dim3 grid,
            dim3 block, size_t shared_bytes, cudaStream_t stream, Arguments... arguments) {
  [&](Parameters... values) {
    void* addresses[] = {const_cast<void*>(static_cast<const void*>(&values))...};
    launch_any(op, device, wishes, reinterpret_cast<const void*>(kernel), grid, block, shared_bytes, stream, addresses);
  }(static_cast<Parameters>(arguments)...);
}

// The same without wishes.
template <typename... Parameters, typename... Arguments>
void launch(const char* op, int device, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
            cudaStream_t stream, Arguments... arguments) {
  launch(op, device, LaunchWishes(), kernel, grid, block, shared_bytes, stream, arguments...);
}

}  // namespace localq
