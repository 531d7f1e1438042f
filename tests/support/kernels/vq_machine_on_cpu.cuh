// In place of csrc/lookup/intrinsics.cuh and csrc/common/launch.h, before all others: what vq_gemv takes from a GPU, on a
// CPU, to test the kernel and its launcher without one. Threads are coroutines that run until they meet others; blocks
// that wait for each other run together. Counts wavefronts of shared memory: what they are above one each are bank
// conflicts.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "common/check.h"
#include "coroutine_on_cpu.h"

// As a compiler sees fit: with all of it inlined, kernels take two to three times as long to compile.
#undef __forceinline__
#define __forceinline__ inline

// The runtime has one device, and no errors.
extern "C" {
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) {
  return cudaSuccess;
}
inline const char* cudaGetErrorString(cudaError_t) {
  return "none";
}
}

namespace on_cpu {

inline int block_threads = 512;

struct Exchange {
  uint32_t word[32][6];
  float sum[32][4];
};
struct Warp {
  // One for even rounds and one for odd ones: lanes read it while others write that of the next round.
  Exchange exchanges[2];
  int here = 0;
  uint64_t round = 0;

  Exchange& exchange() {
    return exchanges[round % 2];
  }
};
struct Block {
  std::vector<uint8_t> memory;
  std::vector<Warp> warps = std::vector<Warp>(block_threads / 32);
  uint32_t number = 0;
  int here = 0;
  uint64_t round = 0;
};
void enter();
struct Thread {
  Coroutine coroutine{enter};
  Block* block = nullptr;
  uint32_t number = 0;
  const uint64_t* awaited = nullptr;  // others, in this round of theirs
  uint64_t round = 0;
  bool done = false;
};

inline Thread* now;
inline std::vector<std::unique_ptr<Block>> running;
inline uint32_t blocks;
inline std::function<void()> body;
inline uint64_t events;  // arrivals and ends: without any in a round of all threads, none will ever go on

// Accesses of warps, and wavefronts beyond the least: look-ups, and 16-byte stores of tables.
struct Count {
  int64_t accesses, conflicts;
};
inline Count lookups, stores;

inline void leave() {
  now->coroutine.leave();
}
template <typename Last>
void meet(int& here, uint64_t& round, int all, Last last) {
  const uint64_t mine = round;
  ++events;
  if (++here == all) {
    last();
    here = 0, ++round;
  }
  now->awaited = &round, now->round = mine;
  while (round == mine) leave();
  now->awaited = nullptr;
}
inline Warp& warp() {
  return now->block->warps[now->number / 32];
}
template <typename Last>
void meet_lanes(Last last) {
  meet(warp().here, warp().round, 32, last);
}

// All lanes see what all lanes give.
inline Exchange& exchange(uint32_t value) {
  Exchange& given = warp().exchange();
  given.word[now->number % 32][0] = value;
  meet_lanes([] {});
  return given;
}
inline std::array<uint32_t, 32> exchanged(uint32_t value) {
  const Exchange& given = exchange(value);
  std::array<uint32_t, 32> all;
  for (int lane = 0; lane < 32; ++lane) all[lane] = given.word[lane][0];
  return all;
}
template <typename To, typename From>
To bits(From from) {
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

inline void count(Count& count, uint32_t address, uint32_t bytes) {
  const Exchange& given = exchange(address);
  if (now->number % 32 != 0) return;
  const int together = bytes == 16 ? 8 : bytes == 8 ? 16 : 32;
  for (int first = 0; first < 32; first += together) {
    uint32_t words[32][32], sizes[32] = {}, most = 0;  // those that differ, of each bank
    for (int lane = first; lane < first + together; ++lane) {
      for (uint32_t at = 0; at < bytes; at += 4) {
        const uint32_t word = (given.word[lane][0] + at) / 4;
        uint32_t *const bank = words[word % 32], &size = sizes[word % 32];
        if (std::find(bank, bank + size, word) == bank + size) bank[size++] = word;
        most = std::max(most, size);
      }
    }
    ++count.accesses, count.conflicts += int64_t(most) - 1;
  }
}

inline void enter() {
  for (;;) {  // once for each launch that takes the thread
    body();
    now->done = true, ++events;
    leave();
  }
}
inline std::vector<std::unique_ptr<Thread>> idle;  // threads of earlier launches: to make one takes system calls
constexpr size_t kIdle = 1024;
inline std::unique_ptr<Thread> take_thread() {
  if (idle.empty()) return std::make_unique<Thread>();
  std::unique_ptr<Thread> thread = std::move(idle.back());
  idle.pop_back();
  thread->done = false;
  return thread;
}

// Blocks first .. first + count - 1, together.
inline void run_together(uint32_t first, uint32_t count, uint32_t shared_bytes) {
  running.clear();
  std::vector<std::unique_ptr<Thread>> threads;
  for (uint32_t number = first; number < first + count; ++number) {
    running.push_back(std::make_unique<Block>());
    Block& block = *running.back();
    block.memory.assign(shared_bytes, 0xff), block.number = number;
    for (uint32_t i = 0; i < block_threads; ++i) {
      threads.push_back(take_thread());
      Thread& thread = *threads.back();
      thread.block = &block, thread.number = i;
    }
  }
  for (bool live = true; live;) {
    live = false;
    const uint64_t before = events;
    for (const auto& thread : threads) {
      if (thread->done) continue;
      live = true;
      if (thread->awaited != nullptr && *thread->awaited == thread->round) continue;
      now = thread.get();
      now->coroutine.enter();
    }
    if (live && events == before) __builtin_trap();  // they wait for each other
  }
  for (auto& thread : threads) {
    if (idle.size() < kIdle) idle.push_back(std::move(thread));
  }
}

struct Place {
  uint32_t x;
};
inline Place thread_place() {
  return {now->number};
}
inline Place block_place() {
  return {now->block->number};
}

}  // namespace on_cpu

#undef __launch_bounds__
#define __launch_bounds__(...)
#define threadIdx on_cpu::thread_place()
#define blockIdx on_cpu::block_place()
#define gridDim (on_cpu::Place{on_cpu::blocks})
#define blockDim (on_cpu::Place{on_cpu::block_threads})

using std::max;
using std::min;

inline void __syncthreads() {
  on_cpu::meet(on_cpu::now->block->here, on_cpu::now->block->round, on_cpu::block_threads, [] {});
}
inline void __threadfence() {
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return on_cpu::bits<T>(on_cpu::exchange(on_cpu::bits<uint32_t>(value)).word[lane][0]);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, uint32_t lanes) {
  return __shfl_sync(mask, value, int(on_cpu::now->number % 32 ^ lanes));
}
inline uint32_t __ballot_sync(unsigned mask, bool vote) {
  uint32_t votes = 0;
  for (int lane = 0; lane < 32; ++lane) votes |= uint32_t(__shfl_sync(mask, int(vote), lane)) << lane;
  return votes;
}
inline int __popc(uint32_t bits) {
  return __builtin_popcount(bits);
}
inline uint32_t __reduce_max_sync(unsigned, uint32_t value) {
  const std::array<uint32_t, 32> all = on_cpu::exchanged(value);
  return *std::max_element(all.begin(), all.end());
}
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t from = selector >> (4 * i) & 7;
    out |= ((from < 4 ? low >> (8 * from) : high >> (8 * (from - 4))) & 255) << (8 * i);
  }
  return out;
}
template <typename T>
T read(const T* from) {
  return *from;
}
#define __ldg read
#define __ldcs read
#define __ldcg read
template <typename T>
void __stcg(T* to, T value) {
  *to = value;
}
inline void atomicMax(uint32_t* to, uint32_t value) {
  *to = std::max(*to, value);
}
inline int atomicAdd(int* to, int value) {
  *to += value;
  return *to - value;
}
inline int __float_as_int(float value) {
  return on_cpu::bits<int>(value);
}
inline uint32_t __float_as_uint(float value) {
  return on_cpu::bits<uint32_t>(value);
}
inline float __int_as_float(int bits) {
  return on_cpu::bits<float>(bits);
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  const float2 x = __half22float2(a), y = __half22float2(b), z = __half22float2(c);
  return __floats2half2_rn(std::fma(x.x, y.x, z.x), std::fma(x.y, y.y, z.y));
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  const float2 x = __bfloat1622float2(a), y = __bfloat1622float2(b), z = __bfloat1622float2(c);
  return __floats2bfloat162_rn(std::fma(x.x, y.x, z.x), std::fma(x.y, y.y, z.y));
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline float rsqrtf(float x) {
  return 1 / std::sqrt(x);
}
inline float __expf(float x) {
  return std::exp(x);
}

namespace localq {

constexpr int kMostDevices = 64;
struct DeviceFacts {
  int multiprocessors, shared_bytes_per_block;
  bool dependent_launch, clusters;
  int system_bytes_per_block = 1024;
};
const DeviceFacts& device_facts(int device, const char* op);
inline void dependency_wait() {
}
inline void release_dependents() {
}

inline uint32_t pack(float low, float high, __half) {
  return on_cpu::bits<uint16_t>(__float2half_rn(low)) | uint32_t(on_cpu::bits<uint16_t>(__float2half_rn(high))) << 16;
}
inline uint32_t pack(float low, float high, __nv_bfloat16) {
  const uint16_t both[2] = {on_cpu::bits<uint16_t>(__float2bfloat16_rn(low)),
                            on_cpu::bits<uint16_t>(__float2bfloat16_rn(high))};
  return both[0] | uint32_t(both[1]) << 16;
}

// m16n8k16 by the PTX manual's layout.
template <typename T>
void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, T) {
  on_cpu::Exchange& given = on_cpu::warp().exchange();
  const uint32_t me = threadIdx.x % 32, words[6] = {a[0], a[1], a[2], a[3], b0, b1};
  std::copy(words, words + 6, given.word[me]);
  std::copy(c, c + 4, given.sum[me]);
  on_cpu::meet_lanes([&given] {
    float left[16][16], right[16][8];
    const auto value = [&given](int lane, int word, int upper) {
      return float(on_cpu::bits<T>(uint16_t(given.word[lane][word] >> (16 * upper))));
    };
    for (int i = 0; i < 64; ++i) {
      const int lane = i / 2, g = lane / 4, t = 2 * (lane % 4) + i % 2;
      left[g][t] = value(lane, 0, i % 2), left[g + 8][t] = value(lane, 1, i % 2);
      left[g][t + 8] = value(lane, 2, i % 2), left[g + 8][t + 8] = value(lane, 3, i % 2);
      right[t][g] = value(lane, 4, i % 2), right[t + 8][g] = value(lane, 5, i % 2);
    }
    for (int i = 0; i < 128; ++i) {
      const int lane = i / 4, row = lane / 4 + i % 4 / 2 * 8, column = lane % 4 * 2 + i % 2;
      double sum = given.sum[lane][i % 4];
      for (int k = 0; k < 16; ++k) sum += double(left[row][k]) * right[k][column];
      given.sum[lane][i % 4] = float(sum);
    }
  });
  std::copy(given.sum[me], given.sum[me] + 4, c);
}

inline uint8_t* shared_memory() {
  return on_cpu::now->block->memory.data();
}
inline uint32_t shared_address(const void* pointer) {
  return uint32_t(static_cast<const uint8_t*>(pointer) - shared_memory());
}
inline uint32_t fresh_lane() {
  return threadIdx.x % 32;
}
template <int kOffset>
void load_half(uint32_t (&to)[1], uint32_t address) {
  on_cpu::count(on_cpu::lookups, address + kOffset, 2);
  uint16_t low;
  std::memcpy(&low, &on_cpu::now->block->memory.at(address + kOffset + 1) - 1, 2);
  to[0] = low;
}
template <int kOffset, size_t kWords>
void load_words(uint32_t (&to)[kWords], uint32_t address) {
  on_cpu::count(on_cpu::lookups, address + kOffset, 4 * kWords);
  std::memcpy(to, &on_cpu::now->block->memory.at(address + kOffset + 4 * kWords - 1) - (4 * kWords - 1), 4 * kWords);
}
inline void store_words(uint8_t* to, uint4 words) {
  on_cpu::count(on_cpu::stores, shared_address(to), 16);
  std::memcpy(to, &words, 16);
}

}  // namespace localq

namespace localq::vq {

inline uint4 load_codes(const uint8_t* from) {
  return *reinterpret_cast<const uint4*>(from);
}
template <size_t kWords>
void load_scales(uint32_t (&to)[kWords], const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % (kWords == 2 ? 8 : 16) != 0) __builtin_trap();
  std::memcpy(to, from, 4 * kWords);
}
inline uint4 load_fragment(const uint4* from) {
  return *from;
}

}  // namespace localq::vq
