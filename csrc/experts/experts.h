// Mixtures of experts for one token (gemv.cu, router.cu), and MXFP4 (mxfp4_*.cu): host API.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/gemv.h"
#include "common/types.h"

namespace localq {

enum class ExpertFormat : int { kMxfp4 = 0, kNf4 = 1, kPlain = 2 };
enum class Gate : int { kSilu = 0, kClamped = 1, kGeluTanh = 2 };  // kClamped: gpt-oss; kGeluTanh: Gemma 4
enum class Weighing : int { kChosen = 0, kAll = 1 };               // softmax over the chosen experts, or over all

constexpr int kMostExperts = 512, kMostChosen = 16;  // a stack may have a shared expert behind so many

// The matrices [out, in] of `experts` experts, consecutive and row-major.
//   kMxfp4  codes u8 [experts, out, in/2], even column = low nibble; scales u8 [experts, out, in/32], E8M0
//   kNf4    codes, scales (absmax) and tables as in Nf4 (nf4/nf4.h), of one matrix [experts * out, in], not tiled
//   kPlain  codes T [experts, out, in]
struct ExpertStack {
  ExpertFormat format;
  const void *codes, *scales;
  const float *nested_absmax, *nested_map;
  float offset;
  const float* code_map;
  int64_t experts, out, in;
};

// chosen i32 [active] and weights f32 [active] of logits f32 [experts]: the largest logits, in descending order; of
// equal ones the lowest index first.
void route(const float* logits, int64_t experts, int active, Weighing how, float* weights, int32_t* chosen, int device,
           cudaStream_t stream);

// The same for the logits norm(x) W^T + bias.
//   x, weight, bias  T [in], [experts, in], [experts] or null
//   workspace        i32 [1 + experts], the first 0 between calls
//   shared_gate      T [in] or null: of an expert that every token goes through, number `experts` of its stacks; then
//                    chosen and weights have one more element, its number and sigmoid(norm(x) . shared_gate), with
//                    logit and sigmoid rounded to T
struct Router {
  const void *x, *weight, *bias;
  NormKind norm;
  const void* norm_weight;
  float eps;
  int64_t in, experts;
  int active;
  Weighing how;
  int32_t* workspace;
  float* weights;
  int32_t* chosen;
  const void* shared_gate;
};
void router(const Router& r, Type type, int device, cudaStream_t stream);

// y T [active, out / 2] = gate of both halves of norm(x) W^T + bias, W and bias of expert chosen[j].
struct ExpertsGateUp {
  ExpertStack stack;
  const void* x;  // T [in]
  NormKind norm;
  const void* norm_weight;
  float eps;
  const void* bias;  // T [experts, out] or null
  const int32_t* chosen;
  int active;
  Gate gate;
  float alpha, limit;  // for kClamped
  bool interleaved;    // row 2 i is a gate and row 2 i + 1 its up; else gates are the first half and ups the second
  void* y;
};
void experts_gate_up(const ExpertsGateUp& e, Type type, int device, cudaStream_t stream);

// y T [out] = residual + sum over j of weights[j] (x[j] W^T + bias), W and bias of expert chosen[j].
struct ExpertsDown {
  ExpertStack stack;
  const void* x;     // T [active, in]
  const void* bias;  // T [experts, out] or null
  const int32_t* chosen;
  const float* weights;
  int active;
  const void* residual;  // T [out] or null; can be y
  bool early;            // the preceding launch is experts_gate_up, and `chosen` is older than it
  void* y;
};
void experts_down(const ExpertsDown& e, Type type, int device, cudaStream_t stream);

// A matrix [out, in] in MXFP4.
struct Mxfp4Matrix {
  const uint8_t *codes, *scales;
  int64_t out, in;
};

// y [rows, sum of outs] = extras(x [rows, in] W^T) for `count` matrices with the same x; 1 to 8 rows, in % 64 == 0.
void mxfp4_gemv(const Mxfp4Matrix* matrices, int count, const GemvExtras& extras, const void* x, void* y, Type type,
                int rows, int device, cudaStream_t stream);

// out [count] of `type` = dequantized codes u8 [count / 2] with scales u8 [count / 32].
void mxfp4_dequantize(const uint8_t* codes, const uint8_t* scales, void* out, Type type, int64_t count, int device,
                      cudaStream_t stream);

}  // namespace localq
