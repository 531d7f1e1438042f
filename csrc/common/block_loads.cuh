// experts/gemv.cuh: what of it only a GPU can do (tests/support/kernels/block_machine_on_cpu.cuh): scales that may be
// left out, words of x, lines asked for early.
#pragma once

#include <cstdint>

#include "common/row_loads.cuh"

namespace localq {

// Scales where more than `needed` bytes are left of the row of codes, else zero: 2 bytes, one, or an f32. volatile, as
// load_weights is; L1 keeps what other steps have of the same line.
__device__ __forceinline__ uint32_t load_scale_16(const uint8_t* at, int left, int needed) {
  uint16_t v;
  asm volatile("{.reg .pred p; setp.gt.s32 p, %2, %3; mov.u16 %0, 0; @p ld.global.nc.u16 %0, [%1];}"
               : "=&h"(v)
               : "l"(at), "r"(left), "r"(needed));
  return v;
}
__device__ __forceinline__ uint32_t load_scale_8(const uint8_t* at, int left, int needed) {
  uint16_t v;
  asm volatile("{.reg .pred p; setp.gt.s32 p, %2, %3; mov.u16 %0, 0; @p ld.global.nc.u8 %0, [%1];}"
               : "=&h"(v)
               : "l"(at), "r"(left), "r"(needed));
  return v;
}
__device__ __forceinline__ float load_scale_f32(const void* at, int left, int needed) {
  float v;
  asm volatile("{.reg .pred p; setp.gt.s32 p, %2, %3; mov.f32 %0, 0f00000000; @p ld.global.nc.f32 %0, [%1];}"
               : "=&f"(v)
               : "l"(at), "r"(left), "r"(needed));
  return v;
}

// 16 bytes of shared memory, by their address there. volatile, as above.
__device__ __forceinline__ uint4 load_word(uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
  return v;
}

// Asks for a line of 128 bytes to be brought to L2.
__device__ __forceinline__ void prefetch(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

}  // namespace localq
