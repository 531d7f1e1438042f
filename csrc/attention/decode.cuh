// What the parts of decode attention (decode.cu) share: sizes, the block's slots and its shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "attention/attention.h"

namespace localq::decoding {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kTile = 16;               // slots of one step of a warp
constexpr int kPiece = kWarps * kTile;  // slots of one step of a block
constexpr int kMaxSplits = 64;
constexpr int kRankBits = 3, kRanks = 1 << kRankBits;  // blocks of a cluster, where there are clusters
constexpr int kAlone = 4;  // pieces per block up to which one cluster (or block) does the work: what joining more costs
constexpr int kPad = 32;   // elements after each row of Q: 8 rows then cover all banks
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLift = 6.f;  // P is 2^6 too large: keeps small ones out of f16's subnormal range
constexpr float kNegInf = -__builtin_huge_valf();

struct Arguments {
  AttentionStep step;
  KvLayer layer;
  bool bf16;      // the type of qkv, norm weights, rotary, out
  int passes;     // blocks.y per kv head
  int rank_bits;  // log2 of the blocks of a cluster: of kRanks or 1
};

// ---- values of the model's type T, chosen at run time: only the few values of one token are touched in this way

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
// What is read after it is at least as new as what the writer of the value had seen.
__device__ __forceinline__ int64_t acquire_load(const int64_t* at) {
  int64_t value;
  asm volatile("ld.acquire.gpu.global.s64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}
__device__ __forceinline__ void prefetch(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

// A score in units of log2, capped.
__device__ __forceinline__ float score(float product, const AttentionStep& step) {
  const float x = product * step.scale;
  return kLog2e * (step.softcap > 0.f ? step.softcap * tanhf(x / step.softcap) : x);
}

// ---- the blocks of a cluster; elsewhere each block is its own

__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#else
  __syncthreads();
#endif
}
// The same place in the shared memory of the cluster's block `rank`.
template <typename T>
__device__ __forceinline__ T* at_rank(T* own, int rank) {
#if __CUDA_ARCH__ >= 900
  T* there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(own), "r"(rank));
  return there;
#else
  return own;
#endif
}

// ---- which slots a block sees

__device__ __forceinline__ int ceil_div(int a, int b) {
  return (a + b - 1) / b;
}

struct Share {
  int first, count;  // the slots of a split, all before the token's own
  int own;           // the split that adds the token's own slot; there are none after it
};

__device__ __forceinline__ Share share_of(const Arguments& a, int position, int split) {
  const int first = a.step.window > 0 ? max(0, position + 1 - a.step.window) : 0;
  const int count = position - first, pieces = ceil_div(count, kPiece);
  const int ranks = 1 << a.rank_bits, blocks = pieces <= kAlone * ranks ? ranks : a.step.splits;
  const int size = kPiece * max(1, ceil_div(pieces, blocks)), filled = ceil_div(count, size);
  const int start = min(split * size, count);
  // in a cluster, a block that would stay idle has the time for it
  const int own = ranks > 1 ? min(filled, blocks - 1) : max(filled - 1, 0);
  return {first + start, min(size, count - start), own};
}

// ---- the block's shared memory

template <int kDim, int kHeadTiles>
struct Shared {
  static constexpr int kHeads = 8 * kHeadTiles;
  alignas(16) uint16_t q[kHeads][kDim + kPad];  // in the type of the tensor cores
  union {
    alignas(16) uint16_t row[kHeads + 2][kDim];  // q heads, k, v of the token in T; no longer needed once Q is there
    alignas(16) float o[kWarps][kHeads][kDim];   // [warp][head][column]
  };
  alignas(16) float incoming[kHeads * kDim];  // from the blocks of the cluster, see combine.cuh
  float2 facts[kRanks][kHeads];               // their largest scores and sums
  float fresh_k[kDim], fresh_v[kDim];         // the token's own, as later steps will read them
  float fresh_score[kHeads];
  float sink[kHeads];  // in units of log2; -inf without sinks
  float largest[kWarps][kHeads], sum[kWarps][kHeads];
  bool last;
};

}  // namespace localq::decoding
