// Choosing the next token on the device (sample.cu).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace localq {

// Tensors of one choice; everything but `logits` is state that outlives it.
//   logits     f32 [vocab]
//   softcap    logits become softcap * tanh(logits / softcap) first; 0 = off
//   seen       u8  [vocab]      tokens that the repetition penalty applies to; the choice is added
//   uniforms   f64 [capacity]   the random number of every step
//   step       i64 [1]          index into uniforms; goes up by one
//   floats     f64 [4]          temperature, top_p, min_p, repetition penalty
//   top_k      i64 [1]          vocab when off
//   chosen     i64 [1]          the choice, -1 where a logit is not finite
//   token      i64 [1]          the choice, 0 in place of -1
//   position   i64 [1] or null  goes up by one
//   workspace  12,544 + 8 vocab bytes, zeros before the first call; left as the next call needs it
struct Sample {
  const float* logits;
  int64_t vocab;
  float softcap;
  uint8_t* seen;
  const double* uniforms;
  int64_t capacity;
  int64_t* step;
  const double* floats;
  const int64_t* top_k;
  int64_t* chosen;
  int64_t* token;
  int64_t* position;
  void* workspace;
};

// Greedy: the largest score, of equal ones the lowest id; else a draw from what top-k, top-p and min-p keep.
void sample(const Sample& s, bool greedy, int device, cudaStream_t stream);

}  // namespace localq
