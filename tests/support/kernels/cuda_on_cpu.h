// One block of threads of a CUDA kernel on the CPU, for tests of its logic where there is no GPU: include this first,
// then the kernel's .cuh. Threads are coroutines that run until they meet a barrier or an exchange between lanes; both
// check that everyone who must take part does, at the same kind of call. `order` shuffles who runs first: a result that
// depends on it is a race. Knows only what the kernels tested this way use.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#include "coroutine_on_cpu.h"

#define __device__
#define __forceinline__ inline

using std::max;

struct Index {
  unsigned x;
};
struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};
static Index threadIdx, blockDim;

namespace on_cpu {

enum Call { kNone, kBarrier, kShuffle, kBallot, kReduce, kWarpBarrier };

// Those who wait for each other: the lanes of a warp, or all threads.
struct Meeting {
  std::vector<uint64_t> given, taken;
  std::vector<bool> here;
  Call call = kNone;
  unsigned round = 0;
};

struct Thread {
  std::unique_ptr<Coroutine> coroutine;
  const unsigned* awaited = nullptr;  // others, in this round of theirs
  unsigned round = 0;
  bool done = false;
};

struct Block {
  std::vector<Thread> threads;
  std::vector<Meeting> warps;
  Meeting all;
  std::function<void()> body;
  unsigned met = 0;  // meetings that came about
  const char* fault = nullptr;
};
static Block* block;

inline void leave() {
  block->threads[threadIdx.x].coroutine->leave();
}

// Waits until everyone `of` has given a value; returns them all.
template <typename Member>
const std::vector<uint64_t>& meet(Meeting& at, Call call, unsigned me, uint64_t value, Member of) {
  if (at.call != kNone && at.call != call) block->fault = "threads met at different calls";
  at.call = call;
  at.given[me] = value;
  at.here[me] = true;
  bool complete = true;
  for (unsigned i = 0; i < at.here.size(); ++i) complete &= at.here[i] == bool(of(i));
  if (!of(me)) block->fault = "a thread is not in its own mask";
  if (complete) {
    at.taken = at.given;
    at.here.assign(at.here.size(), false);
    at.call = kNone;
    ++at.round;
    ++block->met;
  } else {
    Thread& thread = block->threads[threadIdx.x];
    thread.awaited = &at.round, thread.round = at.round;
    while (at.round == thread.round) leave();
    thread.awaited = nullptr;
  }
  return at.taken;
}

inline const std::vector<uint64_t>& meet_lanes(Call call, unsigned mask, uint64_t value) {
  return meet(block->warps[threadIdx.x / 32], call, threadIdx.x % 32, value,
              [mask](unsigned i) { return mask >> i & 1; });
}

inline void enter() {
  block->body();
  block->threads[threadIdx.x].done = true;
  leave();
}

// Runs `body` in `threads` threads (whole warps).
inline void run(unsigned threads, unsigned order, std::function<void()> body) {
  Block all;
  block = &all;
  blockDim.x = threads;
  all.body = std::move(body);
  all.threads.resize(threads);
  const auto meeting = [](unsigned n) { return Meeting{std::vector<uint64_t>(n), {}, std::vector<bool>(n)}; };
  all.warps.assign(threads / 32, meeting(32));
  all.all = meeting(threads);
  for (Thread& thread : all.threads) thread.coroutine = std::make_unique<Coroutine>(enter);
  for (unsigned left = threads, idle = 0; left > 0;) {
    const unsigned before = all.met + left;
    left = 0;
    for (unsigned i = 0; i < threads; ++i) {
      order = order * 1664525u + 1013904223u;
      threadIdx.x = order >> 16 & 1 ? i : threads - 1 - i;  // some twice, some not at all in a round
      Thread& thread = all.threads[threadIdx.x];
      const bool waits = thread.awaited != nullptr && *thread.awaited == thread.round;
      if (!thread.done && !waits) thread.coroutine->enter();
    }
    for (const Thread& thread : all.threads) left += !thread.done;
    idle = all.met + left == before ? idle + 1 : 0;
    if (idle > 200) all.fault = "some threads wait for others that never come";
    if (all.fault != nullptr) throw std::runtime_error(all.fault);
  }
}

template <typename T>
uint64_t bits(T value) {
  uint64_t found = 0;
  std::memcpy(&found, &value, sizeof(T));
  return found;
}
template <typename T>
T value(uint64_t bits) {
  T found;
  std::memcpy(&found, &bits, sizeof(T));
  return found;
}

}  // namespace on_cpu

inline void __syncthreads() {
  on_cpu::meet(on_cpu::block->all, on_cpu::kBarrier, threadIdx.x, 0, [](unsigned) { return true; });
}
inline void __syncwarp(unsigned mask = ~0u) {
  on_cpu::meet_lanes(on_cpu::kWarpBarrier, mask, 0);
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return on_cpu::value<T>(on_cpu::meet_lanes(on_cpu::kShuffle, mask, on_cpu::bits(value))[lane]);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  return __shfl_sync(mask, value, int(threadIdx.x % 32) ^ lanes);
}
inline unsigned __ballot_sync(unsigned mask, bool value) {
  const auto& all = on_cpu::meet_lanes(on_cpu::kBallot, mask, value);
  unsigned found = 0;
  for (unsigned i = 0; i < 32; ++i) found |= (mask >> i & 1) && all[i] ? 1u << i : 0u;
  return found;
}
inline bool __any_sync(unsigned mask, bool value) {
  return __ballot_sync(mask, value) != 0;
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value) {
  const auto& all = on_cpu::meet_lanes(on_cpu::kReduce, mask, value);
  unsigned found = ~0u;
  for (unsigned i = 0; i < 32; ++i) found = mask >> i & 1 ? std::min(found, unsigned(all[i])) : found;
  return found;
}
inline int __popc(unsigned value) {
  return __builtin_popcount(value);
}
inline unsigned __float_as_uint(float value) {
  return on_cpu::value<unsigned>(on_cpu::bits(value));
}
inline float __uint_as_float(unsigned value) {
  return on_cpu::value<float>(value);
}
