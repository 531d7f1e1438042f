// GPU intrinsics: copies of 4 bytes from global to shared memory, beside those of common/async_copies.cuh. Tests
// substitute a CPU version.
#pragma once

#include <cstdint>

#include "common/async_copies.cuh"

namespace localq::scaled {

// 4 bytes. In the group of the lane's copies that ends next.
__device__ __forceinline__ void copy_async_4(uint8_t* to, const uint8_t* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

}  // namespace localq::scaled
