// GPU intrinsics: copies from global to shared memory that a lane issues and waits for later. Tests substitute a CPU
// version.
#pragma once

#include <cstdint>

#include "common/shared_memory.cuh"

namespace localq {

// 16 bytes, past L1: weights are read once.
__device__ __forceinline__ void copy_async(uint8_t* to, const uint8_t* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// The same, or zeros and no access to `from`.
__device__ __forceinline__ void copy_async_or_zero(uint8_t* to, const uint8_t* from, bool copies) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(copies ? 16 : 0)
               : "memory");
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

}  // namespace localq
