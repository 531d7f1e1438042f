// The paths of a row: what they carry from event to event, and how chosen ones take the place of those they grew from.
#pragma once

#include "search/distances.cuh"

namespace localq {

// Paths of one parity in shared memory.
struct Paths {
  float* tails;      // [reach / vector, beam, vector]
  float* aims;       // [beam, step]: -2 times the whitened rest that codewords are to match
  float* costs;      // [beam, 2]: of what is final; and that with the square of the rest
  uint8_t* origins;  // [positions, beam]: which path of a position was the ancestor
};

template <int kStep>
class RowPaths {
 public:
  __device__ __forceinline__ RowPaths(const Search& search, char* shared, int64_t row)
      : s(search), b(search.block), shared(shared), row(row) {
  }

  __device__ __forceinline__ Paths paths(bool next) const {
    char* at = shared + s.paths + (odd != next ? s.paths_bytes : 0);
    return {reinterpret_cast<float*>(at), reinterpret_cast<float*>(at + s.aims), reinterpret_cast<float*>(at + s.costs),
            reinterpret_cast<uint8_t*>(at + s.origins)};
  }
  __device__ __forceinline__ uint16_t* choices(int event) const {
    return reinterpret_cast<uint16_t*>(shared + s.choices) + event * b.beam;
  }
  __device__ __forceinline__ const float* table(int event) const {
    return b.tables + int64_t(event) * (kStep + 1) * kSearchEntries;
  }

  // One path, which has what earlier blocks add.
  __device__ __forceinline__ void begin() {
    const Paths now = paths(false);
    if (int(threadIdx.x) < s.reach) {
      const int i = threadIdx.x;
      now.tails[i / kVector * b.beam * kVector + i % kVector] = i < b.tail ? b.tails[row * b.tail + i] : 0.f;
    }
    __syncthreads();
    if (threadIdx.x == 0) open(now, 0, 0, 0.f, Stretch<kStep>{});
  }

  // The chosen paths replace those they grew from; two threads a path.
  __device__ __forceinline__ void take(int event) {
    const Paths now = paths(false), next = paths(true);
    const int path = threadIdx.x / 2, half = threadIdx.x % 2;
    const bool last = s.event[event] & kLastEvent;
    const unsigned live = __ballot_sync(~0u, path < b.beam);
    if (path < b.beam) {
      const int choice = choices(event)[path], parent = choice >> 8, code = choice & 0xff;
      const Stretch<kStep> rest = left_over(now, event, parent, code);
      const float cost = now.costs[2 * parent], paid = cost + rest.squares();
      if (half == 0 && last) rest.write(errors() + (position * b.beam + path) * kStep);
      if (half == 0 && !last) aim(next, path, cost, rest);
      extend_tails(now.tails + parent * kVector, next.tails + path * kVector, s.event[event], code, half);
      __syncwarp(live);  // half of the tail and the error are the other thread's
      const Stretch<kStep> fed = remember(now.origins + parent, next.origins + path, path, half, last, live);
      if (half == 0 && last && position + 1 < s.positions) open(next, path, position + 1, paid, fed);
    }
    if (last) ++position;
    count = b.beam;
    odd = !odd;
  }

  // Path 0 is the cheapest.
  __device__ __forceinline__ void finish() const {
    const Paths now = paths(false);
    for (int i = threadIdx.x; i < b.columns; i += blockDim.x) {
      const int at = i / kStep, slot = now.origins[at * b.beam];
      b.errors[row * b.columns + i] = errors()[(at * b.beam + slot) * kStep + i % kStep];
    }
    if (int(threadIdx.x) < b.tail) {
      const int i = threadIdx.x;
      b.tails[row * b.tail + i] = now.tails[i / kVector * b.beam * kVector + i % kVector];
    }
    if (threadIdx.x != 0) return;
    for (int event = b.events - 1, slot = 0; event >= 0; --event) {
      const int choice = choices(event)[slot];
      b.codes[row * b.events + event] = uint8_t(choice);
      slot = choice >> 8;
    }
  }

  const Search& s;
  const SearchBlock& b;
  char* shared;
  int count = 1;  // of paths

 private:
  static constexpr int kVector = search_vector(kStep);
  // Registers bound both: paths or positions in work, lines of a small matrix.
  static constexpr int kAtOnce = kStep <= 4 ? 2 : 1, kUnrolled = kStep <= 8 ? kStep : 1;

  __device__ __forceinline__ float* errors() const {
    return reinterpret_cast<float*>(shared);
  }

  // What the codewords at position `at` are to match. `fed`: what earlier errors take from its columns.
  __device__ __forceinline__ void open(const Paths& of, int path, int at, float cost, const Stretch<kStep>& fed) const {
    const float* target = b.targets + row * b.columns + at * kStep;
    const float* white = b.white + int64_t(at) * kStep * kStep;
    float* wanted = of.aims + path * kStep;
#pragma unroll
    for (int i = 0; i < kStep; i += kVector) {
      auto some = load<kVector>(of.tails + i * b.beam + path * kVector);
#pragma unroll
      for (int j = 0; j < kVector; ++j) some.at[j] = target[i + j] - fed.at[i + j] - some.at[j];
      *reinterpret_cast<Floats<kVector>*>(wanted + i) = some;
    }
    Stretch<kStep> rest{};
#pragma unroll(kUnrolled)
    for (int i = 0; i < kStep; ++i) {
      Stretch<kStep> line;
      line.read(white + i * kStep);
#pragma unroll
      for (int j = 0; j < kStep; ++j) rest.at[j] = fmaf(wanted[i], line.at[j], rest.at[j]);
    }
    aim(of, path, cost, rest);
  }

  __device__ __forceinline__ void aim(const Paths& of, int path, float cost, Stretch<kStep> rest) const {
    of.costs[2 * path] = cost;
    of.costs[2 * path + 1] = cost + rest.squares();
#pragma unroll
    for (int i = 0; i < kStep; ++i) rest.at[i] *= -2.f;
    rest.write(of.aims + path * kStep);
  }

  // What the codeword leaves of what was to be matched.
  __device__ __forceinline__ Stretch<kStep> left_over(const Paths& now, int event, int parent, int code) const {
    Stretch<kStep> rest;
    rest.read(now.aims + parent * kStep);
#pragma unroll
    for (int i = 0; i < kStep; ++i) rest.at[i] = fmaf(-0.5f, rest.at[i], -table(event)[i * kSearchEntries + code]);
    return rest;
  }

  // Every other vector of the tail: the parent's and the codeword, without the step that is final.
  __device__ __forceinline__ void extend_tails(const float* from, float* to, unsigned event, int code, int half) const {
    const int book = event & ~kLastEvent, length = b.length[book], shift = event & kLastEvent ? kStep : 0;
    const float* codeword = b.book[book] + code * length;
    for (int i = half * kVector; i < s.reach; i += 2 * kVector) {
      const int old = i + shift;
      Floats<kVector> some = {};
      if (old < s.reach) some = load<kVector>(from + old * b.beam);
      if (old < length) {
        const auto more = load<kVector>(codeword + old);
#pragma unroll
        for (int j = 0; j < kVector; ++j) some.at[j] += more.at[j];
      }
      *reinterpret_cast<Floats<kVector>*>(to + i * b.beam) = some;
    }
  }

  // Passes the ancestors on, and returns, behind a position's last event, what the errors along the path take from the
  // columns of the next one. A thread has every other position; `from` and `to` are columns of `origins`.
  __device__ __forceinline__ Stretch<kStep> remember(const uint8_t* from, uint8_t* to, int path, int half, bool last,
                                                     unsigned live) const {
    const bool feeds = last && position + 1 < s.positions;
    const float* feedback = b.feedback + (position + 1) * kStep;
    Stretch<kStep> sum{};
#pragma unroll(kAtOnce)
    for (int at = half; at < position + int(last); at += 2) {
      const int slot = at == position ? path : from[at * b.beam];
      to[at * b.beam] = uint8_t(slot);
      if (!feeds) continue;
      const float* errors_there = errors() + (at * b.beam + slot) * kStep;
#pragma unroll(kUnrolled)
      for (int i = 0; i < kStep; i += kVector) {
        const auto error = load<kVector>(errors_there + i);
#pragma unroll
        for (int part = 0; part < kVector; ++part) {
          Stretch<kStep> line;
          line.read(feedback + int64_t(at * kStep + i + part) * b.columns);
#pragma unroll
          for (int j = 0; j < kStep; ++j) sum.at[j] = fmaf(error.at[part], line.at[j], sum.at[j]);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kStep; ++j) sum.at[j] += __shfl_xor_sync(live, sum.at[j], 1);
    return sum;
  }

  int64_t row;
  int position = 0;
  bool odd = false;  // which paths are the present ones
};

}  // namespace localq
