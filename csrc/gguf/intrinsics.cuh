// GPU intrinsics: copies from global to shared memory that a lane issues and waits for later. Tests substitute a CPU
// version.
#pragma once

#include <cstdint>

#include "common/shared_memory.cuh"

namespace localq::gguf {

// 16 bytes, past L1: weights are read once.
__device__ __forceinline__ void copy_async(uint8_t* to, const uint8_t* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// Ends a group of the lane's copies.
__device__ __forceinline__ void end_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `kLater` of the lane's groups are on their way.
template <int kLater>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
}

}  // namespace localq::gguf
