// Arguments that all matrix-vector products share, whatever the format of the weights: norm, bias, residual,
// activation.
#pragma once

#include <cstdint>

namespace localq {

constexpr int kMaxSegments = 3;  // matrices of one launch: q, k and v, or gate and up

enum class NormKind : int { kNone = 0, kPlain = 1, kOffset = 2 };
enum class Activation : int { kNone = 0, kSilu = 1, kGeluTanh = 2, kGelu = 3 };

// y = residual + product + bias, computed in f32 and rounded once. With an activation there are two segments of equal
// size, and y = act(first) * second.
struct GemvExtras {
  NormKind norm;            // applied to x; kPlain rounds x/rms to T, then scales (Llama); kOffset rounds last (Gemma)
  const void* norm_weight;  // [in]: T for kPlain, f32 (1 + weight) for kOffset
  float eps;                // of the norm
  const void* residual;     // T [rows, out] or null; not with an activation
  Activation activation;
  const void* bias[kMaxSegments];  // T [out of the segment] or null
  bool y_is_f32;                   // else y is T
};

}  // namespace localq
