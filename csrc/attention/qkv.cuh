// Decode attention (decode.cu): q, k and v of the current token, from the projections to the point of use.
#pragma once

#include <type_traits>

#include "attention/decode.cuh"
#include "attention/kv_codes.cuh"

namespace localq::decoding {

// Copies q of the block's heads, k and v from `qkv` to shared memory. The block must synchronize afterwards.
template <int kDim, int kHeadTiles>
__device__ __forceinline__ void stage_rows(Shared<kDim, kHeadTiles>& shared, const Arguments& a, int kv_head,
                                           int first_head, int heads) {
  const int chunks = a.layer.head_dim / 8, apart = a.step.q_stride / 8;
  const uint4* qkv = row_of(a);
  const auto* kv = qkv + int64_t(a.step.heads) * apart;  // k of all kv heads, then v
  for (int i = threadIdx.x; i < (heads + 2) * chunks; i += kThreads) {
    const int row = i / chunks, chunk = i % chunks;
    const uint4* from = row < heads ? qkv + int64_t(first_head + row) * apart
                                    : kv + int64_t(kv_head + (row - heads) * a.layer.kv_heads) * chunks;
    *reinterpret_cast<uint4*>(&shared.row[row][8 * chunk]) = __ldcg(from + chunk);
  }
}

// The sink of the thread's head, for the first `heads` threads, in units of log2.
__device__ __forceinline__ float load_sink(const Arguments& a, int first_head, int heads) {
  if (a.step.sinks == nullptr || int(threadIdx.x) >= heads) return kNegInf;
  return kLog2e * value_of(static_cast<const uint16_t*>(a.step.sinks)[first_head + threadIdx.x], a.bf16);
}

// A lane's entries of the rotary table and norm weights, for elements lane + 32 i; loaded ahead of any wait.
template <int kDim>
struct Tables {
  static constexpr int kEach = kDim / 32;
  unsigned turn[kEach];  // cos in the lower half, sin in the upper, as in the table; 1 and 0 past rotary_dim
  static constexpr bool kShared = kDim >= 256;  // weights of the norms are in shared memory: registers would spill
  float q_weight[kShared ? 1 : kEach], k_weight[kShared ? 1 : kEach];

  // `weights` [2][kDim]: in shared memory. Before they are used the block must synchronize.
  __device__ __forceinline__ void load_weights(float (&weights)[2][kDim], const Arguments& a, int lane) {
    if constexpr (kShared) {
      for (int e = threadIdx.x; e < a.layer.head_dim; e += kThreads) {
        weights[0][e] = weight(a.step.q_norm, a.step.q_norm_weight, e, a.bf16);
        weights[1][e] = weight(a.step.k_norm, a.step.k_norm_weight, e, a.bf16);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int e = min(lane + 32 * i, a.layer.head_dim - 1);
        q_weight[i] = weight(a.step.q_norm, a.step.q_norm_weight, e, a.bf16);
        k_weight[i] = weight(a.step.k_norm, a.step.k_norm_weight, e, a.bf16);
      }
    }
  }

  __device__ __forceinline__ void load_turns(const Arguments& a, int position, int lane) {
    const int rotary_dim = a.step.rotary_dim;
    const auto* turns = static_cast<const uint16_t*>(a.step.rotary) + int64_t(position) * 2 * rotary_dim;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int e = lane + 32 * i;
      turn[i] = e < rotary_dim ? turns[e] | unsigned(turns[rotary_dim + e]) << 16 : bits_of(1.f, a.bf16);
    }
  }

  __device__ __forceinline__ static float weight(NormKind kind, const void* weights, int e, bool bf16) {
    if (kind == NormKind::kNone) return 1.f;
    if (kind == NormKind::kOffset) return static_cast<const float*>(weights)[e];
    return value_of(static_cast<const uint16_t*>(weights)[e], bf16);
  }
};

// x[i] = element lane + 32 i of one row of the token, as in `row`.
template <int kDim>
__device__ __forceinline__ void read_row(float (&x)[kDim / 32], const uint16_t* row, const Arguments& a, int lane) {
#pragma unroll
  for (int i = 0; i < kDim / 32; ++i) {
    x[i] = lane + 32 * i < a.layer.head_dim ? value_of(row[lane + 32 * i], a.bf16) : 0.f;
  }
}

// The same, normalized and rotated, rounded to T after each, as in the model; the calling warp owns `row`.
template <int kDim>
__device__ __forceinline__ void prepare(float (&x)[kDim / 32], uint16_t* row, const Arguments& a, bool is_k,
                                        const Tables<kDim>& tables, const float (&weights)[2][kDim], int lane) {
  const NormKind norm = is_k ? a.step.k_norm : a.step.q_norm;
  const float eps = is_k ? a.step.k_eps : a.step.q_eps;
  const int head_dim = a.layer.head_dim, half = a.step.rotary_dim / 2;
  read_row<kDim>(x, row, a, lane);
  if (norm != NormKind::kNone) {
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) squares += x[i] * x[i];
    const float inverse_rms = rsqrtf(warp_sum(squares) / head_dim + eps);
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
      float quotient = x[i] * inverse_rms;
      if (norm == NormKind::kPlain) quotient = rounded(quotient, a.bf16);
      float weight;
      if constexpr (Tables<kDim>::kShared) {
        weight = weights[is_k][min(lane + 32 * i, head_dim - 1)];
      } else {
        weight = is_k ? tables.k_weight[i] : tables.q_weight[i];
      }
      x[i] = rounded(quotient * weight, a.bf16);
      if (lane + 32 * i < head_dim) row[lane + 32 * i] = bits_of(x[i], a.bf16);
    }
    __syncwarp();
  }
  if (half == 0) return;
#pragma unroll
  for (int i = 0; i < kDim / 32; ++i) {
    const int e = lane + 32 * i;
    const int partner = e < half ? e + half : e < 2 * half ? e - half : 0;
    const float cos = value_of(uint16_t(tables.turn[i]), a.bf16), sin = value_of(tables.turn[i] >> 16, a.bf16);
    x[i] = rounded(x[i] * cos + value_of(row[partner], a.bf16) * sin, a.bf16);
  }
}

// Writes the token's k or v, given as x[i] = element lane + 32 i, to `slot`, and stores what later steps will read in
// `fresh`. One warp; called by all lanes.
template <int kDim, int kBits>
__device__ __forceinline__ void write_own(float (&x)[kDim / 32], float* fresh, const Arguments& a, void* cache,
                                          void* scales, int64_t slot, bool write, int lane) {
  const int head_dim = a.layer.head_dim;
  Code code[kDim / 32];
  if constexpr (kBits != 16) {
    turn(x, hadamard_width(head_dim), lane);
    encode(code, x, kBits, lane);
  }
#pragma unroll
  for (int i = 0; i < kDim / 32; ++i) {
    const int e = lane + 32 * i;
    if constexpr (kBits == 16) {
      fresh[e] = x[i];
      if (write && e < head_dim) static_cast<uint16_t*>(cache)[slot * head_dim + e] = bits_of(x[i], a.bf16);
    } else {
      const int count = max(0, min(32, head_dim - 32 * i));  // a block without elements gets a scale of 0
      fresh[e] = lane < count ? code[i].value : 0.f;
      if (!write) continue;
      auto* codes = static_cast<uint8_t*>(cache) + slot * (head_dim * kBits / 8);
      store_codes(codes, 32 * i, lane, count, code[i].code, kBits);
      if (lane == 0)
        static_cast<__half*>(scales)[slot * (kDim / 32) + scale_place(i, kDim / 32)] = __float2half_rn(code[i].scale);
    }
  }
}

// Zeros where Q has no head.
template <int kDim, int kHeadTiles>
__device__ __forceinline__ void clear_q(Shared<kDim, kHeadTiles>& shared, int heads) {
  constexpr int kChunks = kDim / 8;
  for (int i = threadIdx.x; i < (8 * kHeadTiles - heads) * kChunks; i += kThreads) {
    *reinterpret_cast<uint4*>(&shared.q[heads + i / kChunks][i % kChunks * 8]) = make_uint4(0, 0, 0, 0);
  }
}

// Q of the heads in the type and order of the tensor cores, one warp per head, and before them the current token's k
// and v in its own split.
template <typename T, int kKeyBits, int kValueBits, int kDim, int kHeadTiles>
__device__ __forceinline__ void prepare_token(Shared<kDim, kHeadTiles>& shared, const Arguments& a, int kv_head,
                                              int heads, int own_slot, bool own, bool write,
                                              const Tables<kDim>& tables) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head_dim = a.layer.head_dim;
  const int64_t slot = int64_t(kv_head) * a.layer.capacity + own_slot;
  const int before = own ? 2 : 0;
  float x[kDim / 32];
  for (int row = warp - before; row < heads; row += kWarps) {
    if (row == -2) {
      prepare<kDim>(x, shared.row[heads], a, true, tables, shared.weight, lane);
      write_own<kDim, kKeyBits>(x, shared.fresh_k, a, a.layer.k, a.layer.k_scales, slot, write, lane);
    } else if (row == -1) {
      read_row<kDim>(x, shared.row[heads + 1], a, lane);
      write_own<kDim, kValueBits>(x, shared.fresh_v, a, a.layer.v, a.layer.v_scales, slot, write, lane);
    } else {
      prepare<kDim>(x, shared.row[row], a, false, tables, shared.weight, lane);
      if (kKeyBits != 16) turn(x, hadamard_width(head_dim), lane);
#pragma unroll
      for (int i = 0; i < kDim / 32; ++i) {
        const float value = lane + 32 * i < head_dim ? x[i] : 0.f;
        shared.q[row][lane + 32 * i] = bits_of(value, std::is_same_v<T, __nv_bfloat16>);
      }
    }
  }
}

// Scores of the current token's k, one warp per head.
template <typename T, int kDim, int kHeadTiles>
__device__ __forceinline__ void score_own(Shared<kDim, kHeadTiles>& shared, const Arguments& a, int heads) {
  const int lane = threadIdx.x % 32;
  for (int head = threadIdx.x / 32; head < heads; head += kWarps) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
      const float q = value_of(shared.q[head][lane + 32 * i], std::is_same_v<T, __nv_bfloat16>);
      sum += q * shared.fresh_k[lane + 32 * i];
    }
    sum = warp_sum(sum);
    if (lane == 0) shared.fresh_score[head] = score(sum, a.step);
  }
}

}  // namespace localq::decoding
