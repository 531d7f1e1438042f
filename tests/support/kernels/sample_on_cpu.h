// In place of csrc/common/launch.h, over launch_on_cpu.h: the other CUDA functions of step/sample.cu and
// step/logit_adjust.cu.
#pragma once

#include "launch_on_cpu.h"

#undef __shared__
#define __shared__ static  // blocks run one after the other, and find what the one before has left
#undef __global__
#define __global__ static

using std::isfinite;

inline unsigned long long value_of(int lane, unsigned long long mine) {
  auto* words = on_cpu::warp().exchange().word;
  words[threadIdx.x % 32][0] = uint32_t(mine), words[threadIdx.x % 32][1] = uint32_t(mine >> 32);
  on_cpu::meet_lanes([] {});
  return uint64_t(words[lane][1]) << 32 | words[lane][0];
}
inline unsigned long long __shfl_xor_sync(unsigned, unsigned long long value, int lanes) {
  return value_of(int(threadIdx.x % 32) ^ lanes, value);
}
inline unsigned long long __shfl_up_sync(unsigned, unsigned long long value, int by) {
  const int lane = int(threadIdx.x % 32);
  return value_of(lane < by ? lane : lane - by, value);
}
inline bool __syncthreads_and(bool holds) {
  static bool all;
  __syncthreads();
  all = true;
  __syncthreads();
  if (!holds) all = false;
  __syncthreads();
  return all;
}
template <typename T>
T atomicAdd(T* to, T value) {
  *to += value;
  return *to - value;
}
template <typename T>
T atomicMax(T* to, T value) {
  const T before = *to;
  *to = std::max(before, value);
  return before;
}
template <typename T>
T atomicOr(T* to, T value) {
  *to |= value;
  return *to;
}
inline float __fdiv_rn(float a, float b) {
  return a / b;
}
inline float __fsub_rn(float a, float b) {
  return a - b;
}
inline int __clzll(long long value) {
  return value == 0 ? 64 : __builtin_clzll(value);
}
inline unsigned long long __double2ull_rn(double value) {
  return static_cast<unsigned long long>(std::nearbyint(value));
}
inline unsigned long long __double2ull_rd(double value) {
  return static_cast<unsigned long long>(std::floor(value));
}
inline unsigned long long __double2ull_ru(double value) {
  return static_cast<unsigned long long>(std::ceil(value));
}
