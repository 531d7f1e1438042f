// What the parts of decode attention (attention_decode.cu) share: sizes, the block's slots and its shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "attention.h"

namespace localq::decoding {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kTile = 16;               // slots of one step of a warp
constexpr int kPiece = kWarps * kTile;  // slots of one step of a block
constexpr int kMaxSplits = 64;
constexpr int kPad = 32;  // elements after each row of Q: 8 rows then cover all banks
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLift = 6.f;  // P is 2^6 too large: keeps small ones out of f16's subnormal range
constexpr float kNegInf = -__builtin_huge_valf();

struct Arguments {
  AttentionStep step;
  KvLayer layer;
  bool bf16;   // the type of qkv, norm weights, rotary, out
  int passes;  // blocks.y per kv head
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
__device__ __forceinline__ void prefetch(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

// A score in units of log2, capped.
__device__ __forceinline__ float score(float product, const AttentionStep& step) {
  const float x = product * step.scale;
  return kLog2e * (step.softcap > 0.f ? step.softcap * tanhf(x / step.softcap) : x);
}

// ---- which slots a block sees

struct Range {
  int first;   // slot
  int count;   // slots before the token's own, from `first`
  int splits;  // at least 1
};

__device__ __forceinline__ int ceil_div(int a, int b) {
  return (a + b - 1) / b;
}

// The slots of split `index`; `whole` describes those of all splits together.
__device__ __forceinline__ Range split_range(int position, int window, int most, int index, Range* whole) {
  const int first = window > 0 ? max(0, position + 1 - window) : 0;
  const int count = position - first;
  const int size = kPiece * ceil_div(max(count, 1), kPiece * most);
  *whole = {first, count, max(1, ceil_div(count, size))};
  const int start = min(index * size, count);
  return {first + start, min(size, count - start), whole->splits};
}

// ---- the block's shared memory: rows of the token, then Q; once S is done, the warps' partial results instead

template <int kDim, int kHeadTiles>
struct Shared {
  static constexpr int kHeads = 8 * kHeadTiles;
  union {
    struct {
      alignas(16) uint16_t row[kHeads + 2][kDim];   // q heads, k, v of the token in T
      alignas(16) uint16_t q[kHeads][kDim + kPad];  // in the type of the tensor cores
    };
    alignas(16) float o[kWarps][kHeads][kDim];  // [warp][head][column]
    struct {
      alignas(16) float joined[kHeads][kDim];
      float weight[kHeads][kMaxSplits];
    };
  };
  float fresh_k[kDim], fresh_v[kDim];  // the token's own, as later steps will read them
  float fresh_score[kHeads];
  float largest[kWarps][kHeads], sum[kWarps][kHeads];
  float total[kHeads];
  bool last;
};

}  // namespace localq::decoding
