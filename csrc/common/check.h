// Checks shared by all launchers (with require.h); kernels do not check anything.
#pragma once

#include <cuda_runtime.h>

#include "common/require.h"

namespace localq {

// Defined in check.cpp, so that no kernel file compiles string code for every architecture.
[[noreturn]] void fail(const char* op, cudaError_t status);

// Throws std::runtime_error with the text of cudaGetErrorString.
inline void check_cuda(cudaError_t status, const char* op) {
  if (status != cudaSuccess) fail(op, status);
}

// Makes `device`, that of the caller's tensors, current for a scope.
class DeviceGuard {
 public:
  DeviceGuard(int device, const char* op) {
    check_cuda(cudaGetDevice(&before_), op);
    if (device != before_) check_cuda(cudaSetDevice(device), op);
    changed_ = device != before_;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// Number of multiprocessors of `device`, cached.
int multiprocessors(int device, const char* op);

}  // namespace localq
