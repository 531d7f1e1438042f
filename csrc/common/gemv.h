// What all matrix-vector products share, whatever the format of the weights: the norm before, what is added after.
#pragma once

#include <cstdint>

namespace localq {

constexpr int kMaxSegments = 3;  // matrices of one launch: q, k and v, or gate and up

enum class NormKind : int { kNone = 0, kPlain = 1, kOffset = 2 };
enum class Activation : int { kNone = 0, kSilu = 1, kGeluTanh = 2, kGelu = 3 };

// y = (residual + product + bias), everything in f32 and rounded once; with an activation there are two segments of one
// size, and y = act(first) * second.
struct GemvExtras {
  NormKind norm;            // of x, before the product; kPlain rounds x/rms to T, then scales (llama's order)
  const void* norm_weight;  // [in]: T for kPlain, f32 (1 + weight) for kOffset, which rounds last (gemma's order)
  float eps;                // of the norm
  const void* residual;     // T [rows, out] or null; not with an activation
  Activation activation;
  const void* bias[kMaxSegments];  // T [out of the segment] or null
  bool y_is_f32;                   // else y is T
};

}  // namespace localq
