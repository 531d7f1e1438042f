// The convolution of many tokens and silu (prefill.cu).
#pragma once

#include "delta/tiles.cuh"

namespace localq::delta {

constexpr int kEight = 8;       // channels of a thread
constexpr int kRunTokens = 16;  // tokens that a thread takes one after the other
constexpr int kConvolveThreads = 128;

// Eight channels of sixteen tokens. The three inputs before them are read again; at the start of a pass they are in
// `columns`, which the same thread moves on.
template <typename T>
__global__ void __launch_bounds__(kConvolveThreads) delta_convolve_kernel(const DeltaPass pass, const Part part) {
  release_dependents();
  const int heads = pass.key_heads * pass.shared, tiles = 2 * pass.key_heads + heads, channels = tiles * kDeltaDim;
  const int runs = part.count * (kChunk / kRunTokens), number = blockIdx.x * kConvolveThreads + threadIdx.x;
  const int channel = number % (channels / kEight) * kEight, run = number / (channels / kEight);
  if (run >= runs) return;
  float taps[kEight][kDeltaTaps];
  const auto* weights = reinterpret_cast<const Run<T, kDeltaTaps>*>(pass.taps) + channel;
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    const Run<T, kDeltaTaps> of = weights[i];
#pragma unroll
    for (int tap = 0; tap < kDeltaTaps; ++tap) taps[i][tap] = to_float(of.value[tap]);
  }
  dependency_wait();

  using Word = Run<T, kEight>;
  const auto input = [&](int token) {
    return *reinterpret_cast<const Word*>(static_cast<const T*>(pass.inputs) + int64_t(token) * channels + channel);
  };
  const int first = part.first + run * kRunTokens;
  float window[kDeltaTaps][kEight];  // the inputs of a token, its own last
  if (first == 0) {
    auto* const columns = reinterpret_cast<Run<T, 3 * kEight>*>(static_cast<T*>(pass.columns) + 3 * channel);
    const Run<T, 3 * kEight> past = *columns;
    Run<T, 3 * kEight> next;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const int token = pass.tokens - 3 + i;
      Word latest = {};
      if (token >= 0) latest = input(token);
#pragma unroll
      for (int j = 0; j < kEight; ++j) {
        window[i + 1][j] = to_float(past.value[3 * j + i]);
        // Of a pass of two tokens, the last column becomes the first, and of one, the last two the first two.
        const T before = token == -1 ? past.value[3 * j + 2] : past.value[3 * j + 1];
        next.value[3 * j + i] = token >= 0 ? latest.value[j] : before;
      }
    }
    *columns = next;
  } else {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      Word before = {};
      if (first - 3 + i < pass.tokens) before = input(first - 3 + i);
#pragma unroll
      for (int j = 0; j < kEight; ++j) window[i + 1][j] = to_float(before.value[j]);
    }
  }

  const Workspace space(pass.workspace, pass.chunks, pass.key_heads, heads);
  const int local = run * kRunTokens, row = local % kChunk;
  T* const tile = reinterpret_cast<T*>(space.tiles) + (int64_t(local / kChunk) * tiles + channel / kDeltaDim) * kTile;
#pragma unroll
  for (int i = 0; i < kRunTokens; ++i) {
    Word out = {};
    if (first + i < pass.tokens) {
      const Word now = input(first + i);
#pragma unroll
      for (int j = 0; j < kEight; ++j) {
        window[0][j] = window[1][j], window[1][j] = window[2][j], window[2][j] = window[3][j];
        window[3][j] = to_float(now.value[j]);
        float sum = window[0][j] * taps[j][0];
        sum = fmaf(window[1][j], taps[j][1], sum);
        sum = fmaf(window[2][j], taps[j][2], sum);
        sum = fmaf(window[3][j], taps[j][3], sum);
        sum = rounded<T>(sum);
        round_to(sum * sigmoid(sum), out.value[j]);
      }
    }
    *reinterpret_cast<Word*>(tile + 8 * word_of(row + i, channel % kDeltaDim / kEight)) = out;
  }
}

}  // namespace localq::delta
