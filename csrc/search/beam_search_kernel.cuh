// The search along one row by one block of threads: beam_search.cu has the page of facts.
//
// Needs only what every CUDA compiler predefines: tests/support/kernels/cuda_on_cpu.h runs this file on the CPU.
#pragma once

#include <cstdint>

#include "search/paths.cuh"

namespace localq {

template <int kStep>
class RowSearch : RowPaths<kStep> {
 public:
  using Base = RowPaths<kStep>;
  using Words = Codewords<kStep>;
  __device__ __forceinline__ RowSearch(const Search& search, char* shared, int64_t row)
      : Base(search, shared, row), lane(threadIdx.x % 32), warp(threadIdx.x / 32) {
  }

  __device__ __forceinline__ void run() {
    Base::begin();
    for (int event = 0; event < b.events; ++event) {
      __syncthreads();
      choose(event);
      __syncthreads();
      Base::take(event);
    }
    __syncthreads();
    Base::finish();
  }

 private:
  using Base::b, Base::s, Base::shared, Base::count, Base::paths, Base::table, Base::choices;

  __device__ __forceinline__ unsigned* lowest(int chunk) const {
    return reinterpret_cast<unsigned*>(shared + s.lowest) + chunk * b.beam;
  }
  __device__ __forceinline__ float* floors() const {
    return reinterpret_cast<float*>(shared + s.floors);
  }
  __device__ __forceinline__ int* counts() const {
    return reinterpret_cast<int*>(shared + s.counts);
  }
  __device__ __forceinline__ unsigned long long* candidates(int of_warp) const {
    return reinterpret_cast<unsigned long long*>(paths(true).tails) + of_warp * s.segment;
  }
  __device__ __forceinline__ void choose(int event) {
    Words words;
    const float own = scan(event, words);
    const float bound = threshold(own);
    gather(event, words, bound);
    rank(event);
  }

  // The `beam`th lowest of all threads' values: no fewer candidates are no higher, and where these are spread over the
  // threads as dice would, 1.4 times as many.
  __device__ __forceinline__ float threshold(float own) {
    own = sorted_lanes(own, lane);
    if (s.warps == 1) return __shfl_sync(~0u, own, b.beam - 1);
    float* all = floors();
    all[threadIdx.x] = own;
    __syncthreads();
    int before = lane;
    for (int other = 0; other < s.warps; ++other) {
      if (other == warp) continue;
      const float* theirs = all + 32 * other;
      int at = 0;
#pragma unroll
      for (int step = 16; step > 0; step /= 2) at += comes_before(theirs[at + step - 1], own, other) ? step : 0;
      before += at + int(comes_before(theirs[at], own, other));
    }
    if (before == b.beam - 1) all[32 * s.warps] = own;
    __syncthreads();
    return all[32 * s.warps];
  }
  __device__ __forceinline__ bool comes_before(float theirs, float own, int other) const {
    return other < warp ? theirs <= own : theirs < own;
  }

  // The lowest cost among this thread's candidates. A warp has every s.warps-th path, a lane kSlots of the codewords.
  __device__ __forceinline__ float scan(int event, Words& words) {
    const Paths now = paths(false);
    float own = __uint_as_float(0x7f800000u);
    for (int chunk = 0; chunk < Words::kChunks; ++chunk) {
      words.read(table(event), chunk, lane);
#pragma unroll(kStep <= 4 ? 2 : 1)
      for (int path = warp, turn = 0; path < count; path += s.warps, ++turn) {
        float distance[Words::kSlots];
        words.distances(now.aims + path * kStep, distance);
        float low = distance[0];
#pragma unroll
        for (int slot = 1; slot < Words::kSlots; ++slot) low = fminf(low, distance[slot]);
        low = fmaxf(now.costs[2 * path + 1] + low, 0.f);  // below zero only by rounding: bits order as numbers do
        // Paths are alike and want the same codewords: a lane takes another lane's for every path, so that what is low
        // does not meet in few threads.
        own = fminf(own, __shfl_xor_sync(~0u, low, turn));
        const unsigned of_path = __reduce_min_sync(~0u, __float_as_uint(low));
        if (lane == 0) lowest(chunk)[path] = of_path;
      }
    }
    __syncwarp();  // one warp alone comes to no barrier before it reads what lane 0 wrote
    return own;
  }

  // Collects all candidates that are no higher than `bound`. Where they are too many for the room there is (equal
  // costs, one path far ahead of all others), the highest key that may stay is searched for.
  __device__ __forceinline__ void gather(int event, Words& words, float bound) {
    unsigned long long low = 0, high = key(bound, 0xffff), limit = high;
    while (true) {
      const int found = collect(event, words, limit);
      if (lane == 0) counts()[warp] = found;
      __syncthreads();
      int all = 0, most = 0;
      for (int i = 0; i < s.warps; ++i) {
        all += counts()[i];
        most = max(most, counts()[i]);
      }
      if (all >= b.beam && most <= s.segment) return;
      __syncthreads();
      if (all >= b.beam) {
        high = limit;
      } else {
        low = limit + 1;
      }
      limit = low + (high - low) / 2;
    }
  }

  // Orders candidates by cost, then path, then code. No two are the same.
  static __device__ __forceinline__ unsigned long long key(float cost, unsigned path_and_code) {
    return static_cast<unsigned long long>(__float_as_uint(cost)) << 16 | path_and_code;
  }

  // Writes this warp's candidates up to `limit`, as many as there is room for, and returns how many there are.
  __device__ __forceinline__ int collect(int event, Words& words, unsigned long long limit) {
    const Paths now = paths(false);
    const unsigned bound = unsigned(limit >> 16);
    unsigned long long* kept = candidates(warp);
    int found = 0;
    for (int chunk = 0; chunk < Words::kChunks; ++chunk) {
      if (Words::kChunks > 1) words.read(table(event), chunk, lane);
      for (int path = warp; path < count; path += s.warps) {
        if (lowest(chunk)[path] > bound) continue;
        float distance[Words::kSlots];
        words.distances(now.aims + path * kStep, distance);
        const float base = now.costs[2 * path + 1];
#pragma unroll
        for (int slot = 0; slot < Words::kSlots; ++slot) {
          const float cost = base + distance[slot];
          if (__any_sync(~0u, !(cost > __uint_as_float(bound)))) {
            found += keep(kept, found, key(fmaxf(cost, 0.f), path << 8 | Words::code(chunk, lane, slot)), limit);
          }
        }
      }
    }
    if (lane == 0 && found < s.segment) kept[found] = ~0ull;  // they are read in pairs
    return found;
  }

  __device__ __forceinline__ int keep(unsigned long long* kept, int found, unsigned long long mine,
                                      unsigned long long limit) {
    const unsigned hits = __ballot_sync(~0u, mine <= limit);
    const int at = found + __popc(hits & ((1u << lane) - 1));
    if (mine <= limit && at < s.segment) kept[at] = mine;
    return __popc(hits);
  }

  // The candidate that has n others below it becomes path n.
  __device__ __forceinline__ void rank(int event) {
    for (int i = lane; i < counts()[warp]; i += 32) {
      const unsigned long long mine = candidates(warp)[i];
      int below = 0;
      for (int other = 0; other < s.warps; ++other) {
        const unsigned long long* theirs = candidates(other);
        const int n = counts()[other];
        for (int j = 0; j < n; j += 2) {
          const auto two = *reinterpret_cast<const ulonglong2*>(theirs + j);
          below += int(two.x < mine) + int(two.y < mine);
        }
      }
      if (below < b.beam) choices(event)[below] = uint16_t(mine);
    }
  }

  const int lane, warp;
};

}  // namespace localq
