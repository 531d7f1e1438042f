// Sampling of the next token on the device (sample.cu), and adjustments of its logits (logit_adjust.cu): host API.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace localq {

// Tensors of one choice; everything except `logits` is persistent state.
//   logits     f32 [vocab]
//   softcap    logits become softcap * tanh(logits / softcap) first; 0 = off
//   seen       u8  [vocab]      tokens that the repetition penalty applies to; the choice is added
//   uniforms   f64 [capacity]   the random number of every step
//   step       i64 [1]          index into uniforms; incremented
//   floats     f64 [5]          temperature, top_p, min_p, repetition penalty, threshold of XTC
//   top_k      i64 [1]          vocab = off
//   chosen     i64 [1]          the choice, -1 if a logit is not finite
//   token      i64 [1]          the choice, 0 instead of -1
//   position   i64 [1] or null  incremented
//   workspace  12,544 + 8 vocab bytes, zeros before the first call; each call resets it for the next
//   excludes   u8  [capacity]   whether XTC acts at each step; null = never, and its kernels are not launched
//   adjusted   the logits come from `adjust`: no penalty is applied
// Of a row of a step that verifies a draft; otherwise false and null:
//   follows    nothing is done if an earlier row has set `diverged`
//   draft      i64 [1] or null  the token drafted for the next row; null in the last row
//   diverged   i32 [1] or null  set to whether the choice is another one than `draft`
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
  bool follows;
  const int64_t* draft;
  int32_t* diverged;
};

// Greedy: the largest score, of equal ones the lowest id; else a draw from the tokens kept by top-k, top-p, min-p and
// XTC.
void sample(const Sample& s, bool greedy, int device, cudaStream_t stream);

// Input and output of DRY.
//   history   i32 [size]   the prompt, then the reply; the reply's last token, if any, is entered here
//   prompt    i64 [1]      tokens of the prompt; at least 1
//   step      i64 [1]      tokens of the reply
//   token     i64 [1]      the last of them
//   window    i64 [1]      how many of the last tokens count
//   breakers  u8  [vocab]  tokens that end a repetition
//   longest   length up to which a repetition is followed
//   matches   i32 [vocab]  raised to the length of the repetition that the token would continue
//   diverged  i32 [1] or null  if set, nothing is done: see Sample
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
  const int32_t* diverged;
};

// The longest suffixes of the history that also occur earlier, by the token that followed them there.
void dry_match(const DryMatch& m, int device, cudaStream_t stream);

// Adjustments of the logits before a choice.
//   logits     f32 [vocab]      in place
//   softcap    as in Sample
//   seen       u8  [vocab]      as in Sample
//   floats     f64 [5]          as in Sample
//   penalties  f32 [longest+1]  subtracted for a repetition of that length; null = no DRY
//   matches    i32 [vocab]      of dry_match; reset to zeros
//   mask       u32 [ceil(vocab/32)]  bit i % 32 of word i / 32: token i is allowed; null = all are
//   diverged   i32 [1] or null  if set, nothing is done: see Sample
struct Adjust {
  float* logits;
  int64_t vocab;
  float softcap;
  const uint8_t* seen;
  const double* floats;
  const float* penalties;
  int32_t* matches;
  const uint32_t* mask;
  const int32_t* diverged;
};

// Soft cap, repetition penalty, DRY, mask. Non-finite logits stay non-finite: `sample` reports them.
void adjust(const Adjust& a, int device, cudaStream_t stream);

}  // namespace localq
