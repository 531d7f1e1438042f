// Choosing the next token on the device (sample.cu), and what acts on its logits before that (logit_adjust.cu).
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
//   floats     f64 [5]          temperature, top_p, min_p, repetition penalty, threshold of XTC
//   top_k      i64 [1]          vocab when off
//   chosen     i64 [1]          the choice, -1 where a logit is not finite
//   token      i64 [1]          the choice, 0 in place of -1
//   position   i64 [1] or null  goes up by one
//   workspace  12,544 + 8 vocab bytes, zeros before the first call; left as the next call needs it
//   excludes   u8  [capacity]   XTC acts at this step; null = it never does, and nothing of it runs
//   adjusted   the logits went through `adjust`: no penalty
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
  const uint8_t* excludes;
  bool adjusted;
};

// Greedy: the largest score, of equal ones the lowest id; else a draw from what top-k, top-p, min-p and XTC keep.
void sample(const Sample& s, bool greedy, int device, cudaStream_t stream);

// What DRY reads of a reply, and what it finds.
//   history   i32 [size]   the prompt, then the reply; where it has tokens, the last one is entered here
//   prompt    i64 [1]      tokens of the prompt; at least 1
//   step      i64 [1]      tokens of the reply
//   token     i64 [1]      the last of them
//   window    i64 [1]      how many of the last tokens count
//   breakers  u8  [vocab]  tokens that end a repetition
//   longest   tokens that a repetition is followed for
//   matches   i32 [vocab]  raised to the length of the repetition that the token would go on with
struct DryMatch {
  int32_t* history;
  int64_t size;
  const int64_t* prompt;
  const int64_t* step;
  const int64_t* token;
  const int64_t* window;
  const uint8_t* breakers;
  int longest;
  int32_t* matches;
};

// The longest ends of the history that stand earlier too, by the token that followed them there.
void dry_match(const DryMatch& m, int device, cudaStream_t stream);

// What becomes of logits before a choice.
//   logits     f32 [vocab]      in place
//   softcap    as in Sample
//   seen       u8  [vocab]      as in Sample
//   floats     f64 [5]          as in Sample
//   penalties  f32 [longest+1]  what a repetition of that length takes off; null = no DRY
//   matches    i32 [vocab]      of dry_match; zeros afterwards
//   mask       u32 [ceil(vocab/32)]  bit i % 32 of word i / 32: token i is allowed; null = all are
struct Adjust {
  float* logits;
  int64_t vocab;
  float softcap;
  const uint8_t* seen;
  const double* floats;
  const float* penalties;
  int32_t* matches;
  const uint32_t* mask;
};

// Soft cap, repetition penalty, DRY, mask. Logits that are not finite stay so: `sample` tells of them.
void adjust(const Adjust& a, int device, cudaStream_t stream);

}  // namespace localq
