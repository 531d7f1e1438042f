// Decode attention (decode.cu): combines the partial results of the warps of a block, the blocks of a cluster and the
// clusters of a kv head, each in a fixed order.
//
// A result is divided into units of 32 columns of one head; block `rank` of a cluster combines the units rank, rank +
// ranks, .. Every other block sends it those through distributed shared memory, so one barrier suffices and all
// operands are local:
//   incoming [source][unit / ranks][32], facts [source][head] = largest score, sum of weights
// With more than one cluster, blocks of the same rank combine in global memory, and the last to arrive finishes:
//   partials o f32 [z][y][cluster][unit][32], then facts f32x2 [z][y][cluster][unit]
// Eight threads share a unit, four columns each.
#pragma once

#include "attention/decode.cuh"
#include "attention/kv_codes.cuh"

namespace localq::decoding {

// Factor that brings a partial result with largest score `largest` to the scale of `highest`; 0 for an empty one.
__device__ __forceinline__ float share(float largest, float highest) {
  return largest == kNegInf ? 0.f : exp2f(largest - highest);
}

// Four columns of an unnormalized result.
struct Partial {
  float4 o;
  float2 facts;  // largest score, sum of weights
};

// The sum of `count` <= kCount partial results.
template <int kCount>
__device__ __forceinline__ Partial joined(const Partial (&part)[kCount], int count) {
  float highest = kNegInf;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i < count) highest = fmaxf(highest, part[i].facts.x);
  }
  Partial all = {{0.f, 0.f, 0.f, 0.f}, {highest, 0.f}};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i >= count) continue;
    const float factor = share(part[i].facts.x, highest);
    all.o.x += factor * part[i].o.x, all.o.y += factor * part[i].o.y;
    all.o.z += factor * part[i].o.z, all.o.w += factor * part[i].o.w;
    all.facts.y += factor * part[i].facts.y;
  }
  return all;
}

// Combines the warps' results and, in the last split, that of the current token, and sends each unit to its block.
template <int kDim, int kHeadTiles>
__device__ __forceinline__ void send(Shared<kDim, kHeadTiles>& shared, int heads, int rank_bits, int rank, bool own) {
  const int ranks = 1 << rank_bits, each = 8 * kHeadTiles * (kDim / 32) >> rank_bits;
  const float lift = exp2f(kLift);  // the scale of P
  for (int i = threadIdx.x; i < heads * (kDim / 4); i += kThreads) {
    const int head = i / (kDim / 4), column = 4 * (i % (kDim / 4)), unit = i / 8;
    Partial part[kWarps + 1];
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      part[warp].o = *reinterpret_cast<const float4*>(&shared.o[warp][head][column]);
      part[warp].facts = make_float2(shared.largest[warp][head], shared.sum[warp][head]);
    }
    const float4 fresh = *reinterpret_cast<const float4*>(&shared.fresh_v[column]);
    part[kWarps].o = make_float4(lift * fresh.x, lift * fresh.y, lift * fresh.z, lift * fresh.w);
    part[kWarps].facts = make_float2(shared.fresh_score[head], lift);
    const Partial all = joined(part, own ? kWarps + 1 : kWarps);
    float* place = &shared.incoming[(rank * each + (unit >> rank_bits)) * 32 + column % 32];
    *reinterpret_cast<float4*>(at_rank(place, unit & (ranks - 1))) = all.o;
    if (i % (kDim / 4) < ranks) *at_rank(&shared.facts[rank][head], i % (kDim / 4)) = all.facts;
  }
}

// Undoes the Hadamard rotation of a unit, four adjacent elements per lane: attention over rotated values gives a
// rotated result.
__device__ __forceinline__ float4 turned_back(float4 o, int width, int lane) {
  float x[4] = {o.x + o.y, o.x - o.y, o.z + o.w, o.z - o.w};
  float y[4] = {x[0] + x[2], x[1] + x[3], x[0] - x[2], x[1] - x[3]};
#pragma unroll
  for (int step = 4; step < 32; step *= 2) {
    if (step >= width) break;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float other = __shfl_xor_sync(~0u, y[i], step / 4);
      y[i] = lane & (step / 4) ? other - y[i] : y[i] + other;
    }
  }
  const float scale = hadamard_scale(width);
  return {y[0] * scale, y[1] * scale, y[2] * scale, y[3] * scale};
}

// The gate of a thread's four columns of a unit, in T; anything without a gate, and where the block has no such unit.
template <int kDim>
__device__ __forceinline__ uint2 load_gate(const Arguments& a, int first_head, int heads, int unit) {
  constexpr int kUnits = kDim / 32;
  const int head = unit / kUnits, column = unit % kUnits * 32 + threadIdx.x % 8 * 4;
  uint2 gate = {};
  if (a.step.gate != nullptr && head < heads && column < a.layer.head_dim) {
    const auto* from = static_cast<const uint16_t*>(a.step.gate) + int64_t(first_head + head) * a.step.gate_stride +
                       int64_t(blockIdx.z) * a.step.gate_row_stride;
    gate = __ldcg(reinterpret_cast<const uint2*>(from + column));
  }
  return gate;
}

// What the four columns are multiplied by, as torch's glu computes it; anything without a gate.
__device__ __forceinline__ float4 sigmoid_of(uint2 gate, const Arguments& a) {
  if (a.step.gate == nullptr) return {};
  const auto sigmoid = [&](unsigned x) { return 1.f / (1.f + expf(-value_of(uint16_t(x), a.bf16))); };
  return {sigmoid(gate.x), sigmoid(gate.x >> 16), sigmoid(gate.y), sigmoid(gate.y >> 16)};
}

// out = o / sum of weights, including the sink's; with a gate that rounded, times `sigmoid`. Called by all lanes of a
// warp; those without `live` write nothing.
template <int kDim>
__device__ __forceinline__ void finish(const Partial& part, float sink, float4 sigmoid, const Arguments& a,
                                       int first_head, int unit, bool live) {
  constexpr int kUnits = kDim / 32;
  const int head_dim = a.layer.head_dim, column = unit % kUnits * 32 + threadIdx.x % 8 * 4;
  const float sum = part.facts.y + exp2f(sink - part.facts.x + kLift);  // infinite if the sink is far above all scores
  float4 o = {part.o.x / sum, part.o.y / sum, part.o.z / sum, part.o.w / sum};
  if (a.layer.key_bits != 16) o = turned_back(o, hadamard_width(head_dim), threadIdx.x % 32);
  if (!live || column >= head_dim) return;
  if (a.step.gate != nullptr) {
    o.x = rounded(o.x, a.bf16) * sigmoid.x, o.y = rounded(o.y, a.bf16) * sigmoid.y;
    o.z = rounded(o.z, a.bf16) * sigmoid.z, o.w = rounded(o.w, a.bf16) * sigmoid.w;
  }
  uint2 packed;
  packed.x = bits_of(o.x, a.bf16) | unsigned(bits_of(o.y, a.bf16)) << 16;
  packed.y = bits_of(o.z, a.bf16) | unsigned(bits_of(o.w, a.bf16)) << 16;
  const int64_t head_of_all = int64_t(blockIdx.z) * a.step.heads + first_head + unit / kUnits;
  auto* out = static_cast<uint16_t*>(a.step.out) + head_of_all * head_dim + column;
  *reinterpret_cast<uint2*>(out) = packed;
}

// One thread's part of a unit, summed over the blocks of the cluster.
template <int kDim, int kHeadTiles>
__device__ __forceinline__ Partial received(const Shared<kDim, kHeadTiles>& shared, int item, int unit, int rank_bits,
                                            int sources) {
  const int each = 8 * kHeadTiles * (kDim / 32) >> rank_bits;
  Partial part[kRanks];
#pragma unroll
  for (int source = 0; source < kRanks; ++source) {
    const int from = source < sources ? source : 0;
    part[source].o = *reinterpret_cast<const float4*>(&shared.incoming[from * each * 32 + 4 * item]);
    part[source].facts = shared.facts[from][unit / (kDim / 32)];
  }
  return joined(part, sources);
}

// The partial results of clusters that belong to one y of the grid.
struct Exchange {
  float4* o;      // [cluster][units][8]
  float2* facts;  // [cluster][units]
  int units;
};

__device__ __forceinline__ Partial fetched(const Exchange& from, int unit, int clusters) {
  constexpr int kBatch = 8;
  Partial part[kBatch + 1];
  part[kBatch] = {{0.f, 0.f, 0.f, 0.f}, {kNegInf, 0.f}};
  for (int first = 0; first < clusters; first += kBatch) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int64_t at = int64_t(min(first + i, clusters - 1)) * from.units + unit;
      const bool live = first + i < clusters;
      part[i].facts = __ldcg(from.facts + at);
      part[i].o = __ldcg(from.o + 8 * at + threadIdx.x % 8);
      if (!live) part[i] = {{0.f, 0.f, 0.f, 0.f}, {kNegInf, 0.f}};
    }
    part[kBatch] = joined(part, kBatch + 1);
  }
  return part[kBatch];
}

// True in the last of the blocks that increment `arrived`; it sees the writes of all of them.
template <int kDim, int kHeadTiles>
__device__ __forceinline__ bool arrives_last(Shared<kDim, kHeadTiles>& shared, int* arrived, int count) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    shared.last = atomicAdd(arrived, 1) == count - 1;
    if (shared.last) *arrived = 0;
    __threadfence();
  }
  __syncthreads();
  return shared.last;
}

// Called after all blocks of the cluster have sent: combines this block's units and, if it is the last, writes `out`.
// `sigmoid`: of the gate of the thread's first unit. With clusters it has no other.
template <int kDim, int kHeadTiles>
__device__ __forceinline__ void receive(Shared<kDim, kHeadTiles>& shared, const Arguments& a, int first_head, int heads,
                                        int rank, int own, float4 sigmoid) {
  constexpr int kUnits = kDim / 32, kMost = 8 * kHeadTiles * kUnits;
  const int bits = a.rank_bits, ranks = 1 << bits, cluster = int(blockIdx.x) >> bits, clusters = (own >> bits) + 1;
  const int sources = min(ranks, own + 1 - (cluster << bits)), lane = threadIdx.x % 32;
  const int items = (max(0, heads * kUnits - rank + ranks - 1) >> bits) * 8;
  if (items == 0) return;
  const int group = blockIdx.z * gridDim.y + blockIdx.y;
  const int64_t places = int64_t(gridDim.y) * gridDim.z * a.step.splits * kMost,
                place = int64_t(group) * a.step.splits * kMost;
  const Exchange exchange = {reinterpret_cast<float4*>(a.step.partials) + 8 * place,
                             reinterpret_cast<float2*>(a.step.partials + 32 * places) + place, kMost};
  const auto factors = [&](int i, int unit) {
    return i == int(threadIdx.x) ? sigmoid : sigmoid_of(load_gate<kDim>(a, first_head, heads, unit), a);
  };
  for (int i = threadIdx.x; i - lane < items; i += kThreads) {
    const int item = min(i, items - 1), unit = (item / 8 << bits) + rank;
    const Partial part = received(shared, item, unit, bits, sources);
    if (clusters == 1) {
      finish<kDim>(part, shared.sink[unit / kUnits], factors(i, unit), a, first_head, unit, i < items);
    } else if (i < items) {
      const int64_t at = int64_t(cluster) * kMost + unit;
      __stcg(exchange.o + 8 * at + i % 8, part.o);
      if (i % 8 == 0) __stcg(exchange.facts + at, part.facts);
    }
  }
  if (clusters == 1 || !arrives_last(shared, a.step.arrived + (group << bits) + rank, clusters)) return;
  for (int i = threadIdx.x; i - lane < items; i += kThreads) {
    const int item = min(i, items - 1), unit = (item / 8 << bits) + rank;
    const Partial part = fetched(exchange, unit, clusters);
    finish<kDim>(part, shared.sink[unit / kUnits], factors(i, unit), a, first_head, unit, i < items);
  }
}

}  // namespace localq::decoding
