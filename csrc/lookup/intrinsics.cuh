// GPU intrinsics of vq_gemv. Tests substitute a CPU version.
#pragma once

#include <cstdint>

#include "common/mma.cuh"
#include "common/shared_memory.cuh"

namespace localq::vq {

// 16 bytes of codes. Bypasses L1: codes are read once. volatile keeps loads and products in source order.
__device__ __forceinline__ uint4 load_codes(const uint8_t* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

// kWords words of scales. volatile, as above; cached in L1, because other lanes read the same line.
__device__ __forceinline__ void load_scales(uint32_t (&to)[2], const void* from) {
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
}
__device__ __forceinline__ void load_scales(uint32_t (&to)[4], const void* from) {
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "l"(from));
}
__device__ __forceinline__ void load_scales(uint32_t (&to)[8], const void* from) {
  uint32_t low[4], high[4];
  load_scales(low, from);
  load_scales(high, static_cast<const uint8_t*>(from) + 16);
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = low[i], to[4 + i] = high[i];
}

// 16 bytes of codewords, cached in L1. volatile: loaded at this point, not kept in registers from an earlier one.
__device__ __forceinline__ uint4 load_fragment(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

}  // namespace localq::vq
