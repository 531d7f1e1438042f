// In place of csrc/attention/intrinsics.cuh, behind vq_machine_on_cpu.cuh. Blocks of a cluster run together, each with
// shared memory of its own, which holds NaN before it is written.
#pragma once

#include <map>

#include "lookup/intrinsics.cuh"

namespace on_cpu {

constexpr uint32_t kSharedBytes = 48 * 1024;

// What all threads of a cluster arrive at and wait for.
struct ClusterBarrier {
  int all = 0, here = 0;
  uint64_t round = 0;
  std::map<const Thread*, uint64_t> arrived;  // in which round
};
inline ClusterBarrier barrier;

struct Place3 {
  uint32_t x, y, z;
};
inline Place3 grid = {1, 1, 1};
inline Place3 block_places() {
  const uint32_t number = now->block->number;
  return {number % grid.x, number / grid.x % grid.y, number / grid.x / grid.y};
}

}  // namespace on_cpu

#undef blockIdx
#undef blockDim
#undef gridDim
#define blockIdx on_cpu::block_places()
inline on_cpu::Place3& gridDim = on_cpu::grid;  // no macro: a launch's configuration has members of this name

inline void __syncwarp() {
  on_cpu::meet_lanes([] {});
}
inline float __uint_as_float(uint32_t bits) {
  return on_cpu::bits<float>(bits);
}
inline bool __any_sync(unsigned mask, bool value) {
  return __ballot_sync(mask, value) != 0;
}
inline unsigned __reduce_min_sync(unsigned, unsigned value) {
  const auto all = on_cpu::exchanged(value);
  return *std::min_element(all.begin(), all.end());
}
inline int __ffs(unsigned value) {
  return __builtin_ffs(int(value));
}
inline float __frcp_rn(float x) {
  return 1 / x;
}
inline float __fdiv_rn(float a, float b) {
  return a / b;
}
inline float __fsub_rn(float a, float b) {
  return a - b;
}
inline int __float2int_rn(float x) {
  return int(std::lrintf(x));
}

namespace localq::decoding {

template <typename T>
T& block_memory() {
  static_assert(sizeof(T) <= on_cpu::kSharedBytes);
  return *reinterpret_cast<T*>(on_cpu::now->block->memory.data());
}
template <typename T>
T& launched_memory() {
  if (sizeof(T) > on_cpu::now->block->memory.size()) __builtin_trap();
  return *reinterpret_cast<T*>(on_cpu::now->block->memory.data());
}
inline int64_t acquire_load(const int64_t* at) {
  return *at;
}
inline void prefetch(const void*) {
}
inline void cluster_arrive() {
  on_cpu::ClusterBarrier& at = on_cpu::barrier;
  if (at.arrived.count(on_cpu::now)) __builtin_trap();  // twice without a wait
  at.arrived[on_cpu::now] = at.round;
  ++on_cpu::events;
  if (++at.here == at.all) at.here = 0, ++at.round;
}
inline void cluster_wait() {
  const uint64_t mine = on_cpu::barrier.arrived.at(on_cpu::now);
  on_cpu::barrier.arrived.erase(on_cpu::now);
  on_cpu::now->awaited = &on_cpu::barrier.round, on_cpu::now->round = mine;
  while (on_cpu::barrier.round == mine) on_cpu::leave();
  on_cpu::now->awaited = nullptr;
}
template <typename T>
T* at_rank(T* own, int rank) {
  const size_t place = reinterpret_cast<uint8_t*>(own) - on_cpu::now->block->memory.data();
  return reinterpret_cast<T*>(&on_cpu::running.at(rank)->memory.at(place + sizeof(T) - 1) - (sizeof(T) - 1));
}
template <typename T>
void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  mma(c, a, b0, b1, T());
}

}  // namespace localq::decoding
