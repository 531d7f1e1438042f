// The state from chunk to chunk, and what is read of it (prefill.cu).
#pragma once

#include "delta/tiles.cuh"

namespace localq::delta {

constexpr int kScanWarps = 4, kScanThreads = 32 * kScanWarps;  // a warp has 16 values
constexpr int kParts = kDeltaDim / (16 * kScanWarps);          // blocks per value head
constexpr int kTokenTiles = kChunk / 8, kKeyTiles = kDeltaDim / 8;

template <typename T>
struct ScanShared {
  uint4 reads[2][kGroups * kBlocks * kWarpWords];
  T queries[kTile];
  T keys[kTile];
  uint4 scores[2][kLowerBlocks * kWarpWords];
  Factors factors;
};

// The tiles and operands of a head in chunk after chunk.
struct ScanOperands {
  const uint8_t *queries, *keys, *reads, *writes, *scores, *factors;
  int64_t tiles, heads;  // in a chunk

  // What the first half of a chunk takes, and what the second half takes.
  template <typename T>
  __device__ __forceinline__ void ask_first(ScanShared<T>& shared, int chunk) const {
    copy_words<kScanThreads, Workspace::kReadsBytes / 16>(shared.reads, reads + chunk * heads * Workspace::kReadsBytes);
    copy_words<kScanThreads, kTile / 8>(shared.queries, queries + chunk * tiles * Workspace::kTileBytes);
  }
  template <typename T>
  __device__ __forceinline__ void ask_second(ScanShared<T>& shared, int chunk) const {
    copy_words<kScanThreads, kTile / 8>(shared.keys, keys + chunk * tiles * Workspace::kTileBytes);
    copy_words<kScanThreads, Workspace::kScoresBytes / 16>(shared.scores,
                                                           scores + chunk * heads * Workspace::kScoresBytes);
    copy_words<kScanThreads, Workspace::kFactorsBytes / 16>(&shared.factors,
                                                            factors + chunk * heads * Workspace::kFactorsBytes);
  }
  // U^T of 16 values.
  __device__ __forceinline__ void load_writes(float (&to)[kTokenTiles][4], int chunk, int group) const {
    const int lane = threadIdx.x % 32;
    const auto* from = reinterpret_cast<const float4*>(writes + chunk * heads * Workspace::kWritesBytes);
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i) {
      const float4 found = __ldcg(from + (group * kTokenTiles + i) * kWarpWords + lane);
      to[i][0] = found.x, to[i][1] = found.y, to[i][2] = found.z, to[i][3] = found.w;
    }
  }
};

// The state S^T of 16 values against W and q: written = U - W S, out = q S.
template <typename T>
__device__ __forceinline__ void read_state(const ScanShared<T>& shared, const float (&state)[kKeyTiles][4],
                                           float (&written)[kTokenTiles][4], float (&out)[kTokenTiles][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < kGroups; ++step) {
    const Split a = split<T>(state[2 * step], state[2 * step + 1]);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const uint4 high = shared.reads[0][(step * kBlocks + i) * kWarpWords + lane];
      const uint4 low = shared.reads[1][(step * kBlocks + i) * kWarpWords + lane];
      uint32_t q[4];
      load_b(q, shared.queries, kBlock * i, 2 * step, lane);
      mma(written[2 * i], a.high, high.x, high.y, T());
      mma(written[2 * i + 1], a.high, high.z, high.w, T());
      mma(out[2 * i], a.high, q[0], q[1], T());
      mma(out[2 * i + 1], a.high, q[2], q[3], T());
      mma(written[2 * i], a.low, high.x, high.y, T());
      mma(written[2 * i + 1], a.low, high.z, high.w, T());
      mma(out[2 * i], a.low, q[0], q[1], T());
      mma(out[2 * i + 1], a.low, q[2], q[3], T());
      mma(written[2 * i], a.high, low.x, low.y, T());
      mma(written[2 * i + 1], a.high, low.z, low.w, T());
    }
  }
}

// out = exp(G) out + (q k^T D) written; S = exp(G_last) S + k^T (exp(G_last - G) written).
template <typename T>
__device__ __forceinline__ void write_state(const ScanShared<T>& shared, float (&state)[kKeyTiles][4],
                                            float (&written)[kTokenTiles][4], float (&out)[kTokenTiles][4]) {
  const int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
  for (int i = 0; i < kTokenTiles; ++i) {
    const float2 factor = *reinterpret_cast<const float2*>(shared.factors.out + 8 * i + 2 * t);
    out[i][0] *= factor.x, out[i][1] *= factor.y, out[i][2] *= factor.x, out[i][3] *= factor.y;
  }
  const float kept = shared.factors.kept[0];
#pragma unroll
  for (int i = 0; i < kKeyTiles; ++i) {
#pragma unroll
    for (int part = 0; part < 4; ++part) state[i][part] *= kept;
  }
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
    Split a = split<T>(written[2 * j], written[2 * j + 1]);
#pragma unroll
    for (int i = j; i < kBlocks; ++i) {
      const uint4 high = shared.scores[0][lower(i, j) * kWarpWords + lane];
      const uint4 low = shared.scores[1][lower(i, j) * kWarpWords + lane];
      mma(out[2 * i], a.high, high.x, high.y, T());
      mma(out[2 * i + 1], a.high, high.z, high.w, T());
      mma(out[2 * i], a.low, high.x, high.y, T());
      mma(out[2 * i + 1], a.low, high.z, high.w, T());
      mma(out[2 * i], a.high, low.x, low.y, T());
      mma(out[2 * i + 1], a.high, low.z, low.w, T());
    }
#pragma unroll
    for (int i = 2 * j; i < 2 * j + 2; ++i) {
      const float2 until = *reinterpret_cast<const float2*>(shared.factors.until + 8 * i + 2 * t);
      written[i][0] *= until.x, written[i][1] *= until.y, written[i][2] *= until.x, written[i][3] *= until.y;
    }
    a = split<T>(written[2 * j], written[2 * j + 1]);
#pragma unroll
    for (int i = 0; i < kKeyTiles; i += 4) {
      uint32_t k[2][4];
      load_b_of_rows(k[0], shared.keys, kBlock * j, i, lane);
      load_b_of_rows(k[1], shared.keys, kBlock * j, i + 2, lane);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t (&values)[4] = half == 0 ? a.high : a.low;
        mma(state[i], values, k[0][0], k[0][1], T());
        mma(state[i + 1], values, k[0][2], k[0][3], T());
        mma(state[i + 2], values, k[1][0], k[1][1], T());
        mma(state[i + 3], values, k[1][2], k[1][3], T());
      }
    }
  }
}

// What 16 values of a head read for the tokens of a chunk.
template <typename T>
__device__ __forceinline__ void store_out(const DeltaPass& pass, const float (&out)[kTokenTiles][4], int first,
                                          int column) {
  const int lane = threadIdx.x % 32, width = pass.key_heads * pass.shared * kDeltaDim;
#pragma unroll
  for (int i = 0; i < kTokenTiles; ++i) {
    const int token = first + 8 * i + lane / 4;
    const uint32_t low = transposed(pack(out[i][0], out[i][1], T()));
    const uint32_t high = transposed(pack(out[i][2], out[i][3], T()));
    if (token >= pass.tokens) continue;
    auto* const to =
        reinterpret_cast<uint32_t*>(static_cast<T*>(pass.out) + int64_t(token) * width + column) + lane % 4;
    to[0] = low, to[4] = high;
  }
}

// A block for 64 values of a value head.
template <typename T>
__global__ void __launch_bounds__(kScanThreads) delta_scan_kernel(const DeltaPass pass, const Part part) {
  auto& shared = *reinterpret_cast<ScanShared<T>*>(shared_memory());
  release_dependents();
  const int heads = pass.key_heads * pass.shared, tiles = 2 * pass.key_heads + heads;
  const int head = blockIdx.x / kParts, key_head = head / pass.shared;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int group = blockIdx.x % kParts * kScanWarps + threadIdx.x / 32;
  const Workspace space(pass.workspace, pass.chunks, pass.key_heads, heads);
  const ScanOperands operands = {space.tiles + int64_t(key_head) * Workspace::kTileBytes,
                                 space.tiles + int64_t(pass.key_heads + key_head) * Workspace::kTileBytes,
                                 space.reads + int64_t(head) * Workspace::kReadsBytes,
                                 space.writes + int64_t(head) * Workspace::kWritesBytes,
                                 space.scores + int64_t(head) * Workspace::kScoresBytes,
                                 space.factors + int64_t(head) * Workspace::kFactorsBytes,
                                 tiles,
                                 heads};
  dependency_wait();

  operands.ask_first(shared, 0);
  float* const matrix = pass.matrix + int64_t(head) * kDeltaDim * kDeltaDim + 16 * group + g;
  float state[kKeyTiles][4];  // S^T [16 values, 128 keys]
#pragma unroll
  for (int i = 0; i < kKeyTiles; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) state[i][j] = __ldcg(matrix + (8 * i + 2 * t + j % 2) * kDeltaDim + j / 2 * 8);
  }
  wait_for_copies();
  __syncthreads();
#pragma unroll 1
  for (int chunk = 0; chunk < part.count; ++chunk) {
    operands.ask_second(shared, chunk);
    float written[kTokenTiles][4], out[kTokenTiles][4] = {};
    operands.load_writes(written, chunk, group);
    read_state(shared, state, written, out);
    wait_for_copies();
    __syncthreads();  // all have read W and q
    if (chunk + 1 < part.count) operands.ask_first(shared, chunk + 1);
    write_state(shared, state, written, out);
    store_out<T>(pass, out, part.first + chunk * kChunk, head * kDeltaDim + 16 * group);
    wait_for_copies();
    __syncthreads();  // all have read k, the scores and the factors
  }
#pragma unroll
  for (int i = 0; i < kKeyTiles; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) matrix[(8 * i + 2 * t + j % 2) * kDeltaDim + j / 2 * 8] = state[i][j];
  }
}

}  // namespace localq::delta
