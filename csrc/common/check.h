// Checks shared by all launchers. A message names the argument and its value; kernels do not check anything.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace localq {

// Defined in check.cpp, so that no kernel file compiles string code for every architecture.
[[noreturn]] void refuse(const char* op, const char* argument, int64_t value, const char* rule);
[[noreturn]] void fail(const char* op, cudaError_t status);

// Throws std::invalid_argument (ValueError in Python): "op: argument = value, rule".
inline void require(bool holds, const char* op, const char* argument, int64_t value, const char* rule) {
  if (!holds) refuse(op, argument, value, rule);
}

inline void require_aligned(const void* pointer, int bytes, const char* op, const char* argument) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  require(pointer != nullptr, op, argument, 0, "must not be null");
  require(address % bytes == 0, op, argument, static_cast<int64_t>(address % bytes), "bytes past an aligned address");
}

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
