// Checks shared by all launchers: the message names the argument and its value, the kernels themselves never check.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace localq {

// What they throw is put together in check.cpp, so that no file of kernels compiles strings, for any architecture.
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

// Throws std::runtime_error with CUDA's own words.
inline void check_cuda(cudaError_t status, const char* op) {
  if (status != cudaSuccess) fail(op, status);
}

// Makes `device` current for a scope: the caller's tensors decide, not whatever was current.
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

// Multiprocessors of `device`; asked once per device.
int multiprocessors(int device, const char* op);

}  // namespace localq
