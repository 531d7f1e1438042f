// Shared by the parts of decode attention (decode.cu): sizes, the slots of a block, and its shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "attention/attention.h"
#include "attention/intrinsics.cuh"

namespace localq::decoding {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kTile = 16;               // slots per step of a warp
constexpr int kPiece = kWarps * kTile;  // slots per step of a block
constexpr int kMaxSplits = 64;
constexpr int kRankBits = 3, kRanks = 1 << kRankBits;  // blocks per cluster, on devices with clusters
constexpr int kAlone = 4;  // pieces per block up to which one cluster (or block) does all work
constexpr int kPad = 32;   // elements after each row of Q, so that 8 rows cover all banks
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLift = 6.f;  // P is scaled by 2^6, which keeps small values out of the subnormal range of f16
constexpr float kNegInf = -__builtin_huge_valf();

struct Arguments {
  AttentionStep step;
  KvLayer layer;
  bool bf16;      // the type of qkv, norm weights, rotary, out
  int passes;     // blocks.y per kv head
  int rank_bits;  // log2 of the blocks per cluster: of kRanks or 1
};

// ---- values of the model's type T, selected at run time: used only for the few values of one token

__device__ __forceinline__ float value_of(uint16_t bits, bool bf16) {
  return bf16 ? __uint_as_float(unsigned(bits) << 16) : __half2float(__ushort_as_half(bits));
}
__device__ __forceinline__ uint16_t bits_of(float value, bool bf16) {
  return bf16 ? __bfloat16_as_ushort(__float2bfloat16_rn(value)) : __half_as_ushort(__float2half_rn(value));
}
__device__ __forceinline__ float rounded(float value, bool bf16) {
  return value_of(bits_of(value, bf16), bf16);
}

__device__ __forceinline__ int64_t fresh_load(const int64_t* at) {
  return __ldcg(reinterpret_cast<const long long*>(at));
}

// A score in units of log2, capped.
__device__ __forceinline__ float score(float product, const AttentionStep& step) {
  const float x = product * step.scale;
  return kLog2e * (step.softcap > 0.f ? step.softcap * tanhf(x / step.softcap) : x);
}

// qkv of the block's row.
__device__ __forceinline__ const uint4* row_of(const Arguments& a) {
  const int64_t chunks = (int64_t(a.step.heads) * a.step.q_stride + 2 * a.layer.kv_heads * a.layer.head_dim) / 8;
  return static_cast<const uint4*>(a.step.qkv) + blockIdx.z * chunks;
}

// ---- the slots of a block

__device__ __forceinline__ int ceil_div(int a, int b) {
  return (a + b - 1) / b;
}

struct Share {
  int first, count;  // the slots of a split, all before the current token's
  int own;           // the split that adds the current token's slot; there are none after it
};

// `slot`: the current token's.
__device__ __forceinline__ Share share_of(const Arguments& a, int slot, int split) {
  const int first = a.step.window > 0 ? max(0, slot + 1 - a.step.window) : 0;
  const int count = slot - first, pieces = ceil_div(count, kPiece);
  const int ranks = 1 << a.rank_bits, blocks = pieces <= kAlone * ranks ? ranks : a.step.splits;
  const int size = kPiece * max(1, ceil_div(pieces, blocks)), filled = ceil_div(count, size);
  const int start = min(split * size, count);
  // In a cluster an otherwise idle block has the time for it.
  const int own = ranks > 1 ? min(filled, blocks - 1) : max(filled - 1, 0);
  return {first + start, min(size, count - start), own};
}

// Heads too wide for the registers of a warp: k and v are loaded in parts, and the block takes more shared memory than
// an instance may have without asking for it.
template <int kDim>
constexpr bool kInParts = kDim > 256;

// ---- the shared memory of a block

template <int kDim, int kHeadTiles>
struct Shared {
  static constexpr int kHeads = 8 * kHeadTiles;
  alignas(16) uint16_t q[kHeads][kDim + kPad];  // in the type of the tensor cores
  union {
    struct {                                       // unused once Q is complete
      alignas(16) uint16_t row[kHeads + 2][kDim];  // q heads, k, v of the token in T
      float weight[2][kDim];                       // of the norms of q and k; of wide heads, see Tables
    };
    alignas(16) float o[kWarps][kHeads][kDim];  // [warp][head][column]
  };
  alignas(16) float incoming[kHeads * kDim];  // from the blocks of the cluster; see combine.cuh
  float2 facts[kRanks][kHeads];               // their largest scores and sums
  float fresh_k[kDim], fresh_v[kDim];         // the current token's, as later steps read them
  float fresh_score[kHeads];
  float sink[kHeads];  // in units of log2; -inf without sinks
  float largest[kWarps][kHeads], sum[kWarps][kHeads];
  bool last;
};

// That of a block which only writes k and v of a token.
template <int kDim>
struct Written {
  alignas(16) uint16_t row[2][kDim];  // k, v in T
  float weight[2][kDim];              // as in Shared
  float fresh[2][kDim];               // not read
};

}  // namespace localq::decoding
