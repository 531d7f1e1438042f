// Decode attention, and the storage of the KV cache: host API.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/gemv.h"
#include "common/types.h"

namespace localq {

// Keys and values of one layer, vectors of head_dim: [kv_heads, capacity, ...].
//   bits 16     k, v T [head_dim]; scales null
//   bits 8, 4   k, v u8 [head_dim * bits / 8]; scales f16 [scales_of(head_dim)]; see kv_codes.cuh
// Keys and values have the same bits, or keys 8 and values 4.
struct KvLayer {
  void* k;
  void* v;
  void* k_scales;
  void* v_scales;
  int key_bits;
  int kv_heads, head_dim;
  int value_bits;
  int64_t capacity;
};

// Attention of one token, or of some consecutive ones, in one layer.
//   qkv       T [rows, heads * q_stride + 2 kv_heads * head_dim]: q, k, v in this order, before norm and rotation
//   q_stride  elements from q of a head to that of the next: head_dim, or more where something lies between them
//   position  i64 [1] on the device: of the first row
//   base      i64 [1] on the device: the position of slot 0; null = 0. Steps do not change it
//   rotary    T [ctx, 2, rotary_dim], cos and signed sin, or null
//   sinks     T [heads], an additional score in the softmax of each head, without a value; or null
//   gate      T; its sigmoid multiplies what is gathered, rounded before and after. That of head h of row r begins at
//             gate + r * gate_row_stride + h * gate_stride elements, as part of qkv or elsewhere; or null
//   out       T [rows, heads * head_dim]
//   partials  f32 [rows * attention_partials(...)] of these splits
//   arrived   i32 [rows * kv_heads * 16], all zero before and after
struct AttentionStep {
  const void* qkv;
  const int64_t* position;
  const int64_t* base;
  const void* rotary;
  int rotary_dim;
  const void* sinks;
  int heads, q_stride;
  const void* gate;
  int gate_stride, gate_row_stride;
  NormKind q_norm, k_norm;
  const void* q_norm_weight;
  const void* k_norm_weight;
  float q_eps, k_eps;
  float scale, softcap;  // softcap 0 = none
  int window;            // 0 = all
  void* out;
  float* partials;
  int* arrived;
  int splits;  // at most; see attention_splits
  int rows;    // 1 to kMostRows: consecutive tokens, each of which sees those before it
};

constexpr int kMostRows = 8;

// Blocks per kv head that fill the device about three times, in whole clusters on devices that have them.
int attention_splits(int kv_heads, int device);
// Floats of `partials` for the largest of the layers.
int64_t attention_partials(int heads, int kv_heads, int head_dim, int splits);

// One launch for one row. For several the keys and values of all rows are written by a launch before.
void attention_decode(const AttentionStep& step, const KvLayer& layer, Type type, int device, cudaStream_t stream);

// Stores k, v [tokens, kv_heads, head_dim] (row strides `k_stride`, `v_stride`, in elements) at slots i64 [tokens].
void kv_write(const KvLayer& layer, const void* k, const void* v, int64_t k_stride, int64_t v_stride,
              const int64_t* slots, int tokens, Type type, int device, cudaStream_t stream);

// k, v [kv_heads, live, head_dim] = the first `live` slots, dequantized.
void kv_read(const KvLayer& layer, void* k, void* v, int64_t live, Type type, int device, cudaStream_t stream);

}  // namespace localq
