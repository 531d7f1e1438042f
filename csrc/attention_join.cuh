// Decode attention (attention_decode.cu): joining the results of the warps of a block, and of the blocks of a kv head.
#pragma once

#include "attention_block.cuh"
#include "kv_codes.cuh"

namespace localq::decoding {

// Factor that brings a partial result with largest score `largest` to the scale of `highest`; 0 for an empty one.
__device__ __forceinline__ float share(float largest, float highest) {
  return largest == kNegInf ? 0.f : exp2f(largest - highest);
}

// Joins the warps' results and, in the last split, the token's own: o[0] and sum[0] unnormalised, largest[0].
template <int kDim, int kHeadTiles>
__device__ __forceinline__ void join_warps(Shared<kDim, kHeadTiles>& shared, int heads, bool own) {
  const float lift = exp2f(kLift);
  for (int i = threadIdx.x; i < heads * (kDim / 4); i += kThreads) {
    const int head = i / (kDim / 4), column = 4 * (i % (kDim / 4));
    float highest = own ? shared.fresh_score[head] : kNegInf;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) highest = fmaxf(highest, shared.largest[warp][head]);
    float4 joined = {};
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const float factor = share(shared.largest[warp][head], highest);
      const float4 o = *reinterpret_cast<const float4*>(&shared.o[warp][head][column]);
      joined.x += factor * o.x, joined.y += factor * o.y, joined.z += factor * o.z, joined.w += factor * o.w;
    }
    if (own) {
      const float factor = lift * exp2f(shared.fresh_score[head] - highest);
      const float4 o = *reinterpret_cast<const float4*>(&shared.fresh_v[column]);
      joined.x += factor * o.x, joined.y += factor * o.y, joined.z += factor * o.z, joined.w += factor * o.w;
    }
    *reinterpret_cast<float4*>(&shared.o[0][head][column]) = joined;  // read by this thread alone
  }
  __syncthreads();
  const int head = threadIdx.x;
  if (head < heads) {
    float highest = own ? shared.fresh_score[head] : kNegInf, total = 0.f;
    for (int warp = 0; warp < kWarps; ++warp) highest = fmaxf(highest, shared.largest[warp][head]);
    for (int warp = 0; warp < kWarps; ++warp) {
      total += share(shared.largest[warp][head], highest) * shared.sum[warp][head];
    }
    if (own) total += lift * exp2f(shared.fresh_score[head] - highest);
    shared.largest[0][head] = highest;
    shared.total[head] = total;
  }
  __syncthreads();
}

// out = joined / total, turned back where the cache is turned. The block must have synchronised.
template <int kDim, int kHeadTiles>
__device__ __forceinline__ void finish(const Shared<kDim, kHeadTiles>& shared, const Arguments& a, int first_head,
                                       int heads, bool turn) {
  const int lane = threadIdx.x % 32, head_dim = a.layer.head_dim, blocks = (head_dim + 31) / 32;
  auto* out = static_cast<uint16_t*>(a.step.out);
  for (int i = threadIdx.x / 32; i < heads * blocks; i += kWarps) {
    const int head = i / blocks, column = 32 * (i % blocks) + lane;
    float value = shared.joined[head][column] / shared.total[head];
    if (turn) value = turned(value, hadamard_width(head_dim), lane);
    if (column < head_dim) out[int64_t(first_head + head) * head_dim + column] = bits_of(value, a.bf16);
  }
}

// Where the partial results of a kv head lie: o [splits][heads][kDim], then (largest, sum) [splits][heads].
struct Partials {
  float* o;
  float2* facts;
};

template <int kDim, int kHeadTiles>
__device__ __forceinline__ void join_splits(Shared<kDim, kHeadTiles>& shared, Partials from, int heads, int splits) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int head = warp; head < heads; head += kWarps) {
    float2 fact[kMaxSplits / 32];
    float highest = kNegInf, total = 0.f;
#pragma unroll
    for (int i = 0; i < kMaxSplits / 32; ++i) {
      const int split = lane + 32 * i;
      fact[i] = split < splits ? __ldcg(from.facts + split * heads + head) : make_float2(kNegInf, 0.f);
      highest = fmaxf(highest, fact[i].x);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
#pragma unroll
    for (int i = 0; i < kMaxSplits / 32; ++i) {
      const float factor = share(fact[i].x, highest);
      shared.weight[head][lane + 32 * i] = factor;
      total += factor * fact[i].y;
    }
    total = warp_sum(total);
    if (lane == 0) shared.total[head] = total;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < heads * (kDim / 4); i += kThreads) {
    const int head = i / (kDim / 4), column = 4 * (i % (kDim / 4));
    float4 joined = {};
#pragma unroll 8
    for (int split = 0; split < splits; ++split) {
      const float4 o =
          __ldcg(reinterpret_cast<const float4*>(from.o + (int64_t(split) * heads + head) * kDim + column));
      const float factor = shared.weight[head][split];
      joined.x += factor * o.x, joined.y += factor * o.y, joined.z += factor * o.z, joined.w += factor * o.w;
    }
    *reinterpret_cast<float4*>(&shared.joined[head][column]) = joined;
  }
  __syncthreads();
}

// Puts the block's result where the others' are; true in the block that came last, which sees them all.
template <int kDim, int kHeadTiles>
__device__ __forceinline__ bool deliver(Shared<kDim, kHeadTiles>& shared, Partials to, int* arrived, int heads,
                                        int split, int splits) {
  for (int i = threadIdx.x; i < heads * (kDim / 4); i += kThreads) {
    const float4 o = *reinterpret_cast<const float4*>(&shared.o[0][0][0] + 4 * i);
    __stcg(reinterpret_cast<float4*>(to.o + int64_t(split) * heads * kDim) + i, o);
  }
  if (threadIdx.x < heads) {
    const float2 fact = make_float2(shared.largest[0][threadIdx.x], shared.total[threadIdx.x]);
    __stcg(to.facts + split * heads + threadIdx.x, fact);
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    shared.last = atomicAdd(arrived, 1) == splits - 1;
    if (shared.last) *arrived = 0;
    __threadfence();
  }
  __syncthreads();
  return shared.last;
}

}  // namespace localq::decoding
