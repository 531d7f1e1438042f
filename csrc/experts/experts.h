// Mixtures of experts for one token, and MXFP4 (experts*.cu, mxfp4*.cu): what is offered.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/gemv.h"
#include "common/types.h"

namespace localq {

enum class ExpertFormat : int { kMxfp4 = 0, kNf4 = 1, kPlain = 2 };
enum class Gate : int { kSilu = 0, kClamped = 1 };    // kClamped: gpt-oss
enum class Weighing : int { kChosen = 0, kAll = 1 };  // softmax over the chosen experts alone, or over all

constexpr int kMostExperts = 512, kMostChosen = 16;

// The matrices [out, in] of `experts` experts behind each other, row by row.
//   kMxfp4  codes u8 [experts, out, in/2], even column = low nibble; scales u8 [experts, out, in/32], E8M0
//   kNf4    codes, scales (absmax) and tables as of Nf4 (nf4/nf4.h), of one matrix [experts * out, in], not tiled
//   kPlain  codes T [experts, out, in]
struct ExpertStack {
  ExpertFormat format;
  const void *codes, *scales;
  const float *nested_absmax, *nested_map;
  float offset;
  const float* code_map;
  int64_t experts, out, in;
};

// chosen i32 [active] and weights f32 [active] of logits f32 [experts]: the largest, largest first, then lowest first.
void route(const float* logits, int64_t experts, int active, Weighing how, float* weights, int32_t* chosen, int device,
           cudaStream_t stream);

// The same of the logits norm(x) W^T + bias.
//   x, weight, bias  T [in], [experts, in], [experts] or null;   workspace  i32 [1 + experts], the first 0 between
//   calls
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
};
void router(const Router& r, Type type, int device, cudaStream_t stream);

// y T [active, out / 2] = gate of both halves of norm(x) W^T + bias, W and bias those of expert chosen[j].
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
  float alpha, limit;  // of kClamped
  bool interleaved;    // row 2 i is a gate and row 2 i + 1 its up; else those of the first half and of the second
  void* y;
};
void experts_gate_up(const ExpertsGateUp& e, Type type, int device, cudaStream_t stream);

// y T [out] = residual + sum over j of weights[j] (x[j] W^T + bias), W and bias those of expert chosen[j].
struct ExpertsDown {
  ExpertStack stack;
  const void* x;     // T [active, in]
  const void* bias;  // T [experts, out] or null
  const int32_t* chosen;
  const float* weights;
  int active;
  const void* residual;  // T [out] or null; may be y
  bool early;            // the launch before is experts_gate_up, and `chosen` was there before it
  void* y;
};
void experts_down(const ExpertsDown& e, Type type, int device, cudaStream_t stream);

// A matrix [out, in] in MXFP4.
struct Mxfp4Matrix {
  const uint8_t *codes, *scales;
  int64_t out, in;
};

// y [rows, sum of outs] = extras(x [rows, in] W^T) for `count` matrices that share x; rows 1 to 8, in % 64 == 0.
void mxfp4_gemv(const Mxfp4Matrix* matrices, int count, const GemvExtras& extras, const void* x, void* y, Type type,
                int rows, int device, cudaStream_t stream);

// out [count] of `type` = the weights that codes u8 [count / 2] and scales u8 [count / 32] stand for.
void mxfp4_dequantize(const uint8_t* codes, const uint8_t* scales, void* out, Type type, int64_t count, int device,
                      cudaStream_t stream);

}  // namespace localq
