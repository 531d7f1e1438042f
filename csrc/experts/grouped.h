// Mixtures of experts for many tokens: entries (a token and one of its experts) sorted by expert, products of all
// experts of a layer in one launch, and the weighted sums of each token. Host API.
#pragma once

#include "experts/experts.h"

namespace localq {

constexpr int kTileEntries = 64;  // entries of one expert that a block multiplies at once

// Sorts `count` entries by expert: number i is token i / active with expert chosen[i], which is clamped to one that
// there is.
//   rows       i32 [count]    token of each place in the sorted order
//   places     i32 [count]    place of each entry
//   ends       i32 [experts]  places up to the end of each expert
//   tile_ends  i32 [experts]  tiles of up to kTileEntries places of one expert, up to the end of each expert
// The order of an expert's entries may differ from run to run; no product depends on it.
struct ExpertEntries {
  const int64_t* chosen;
  int64_t count;
  int active, experts;
  int32_t *rows, *places, *ends, *tile_ends;
};
void experts_sort(const ExpertEntries& e, int device, cudaStream_t stream);

// y T [entries, out], or [entries, out / 2] with a gate: x W^T + bias of each entry, W and bias of its expert; sums in
// f32, rounded once, and the gate's result once more.
struct ExpertsGemm {
  ExpertStack stack;  // experts first .. first + stack.experts - 1 of the layer
  int64_t first;
  const void* x;                    // T [tokens, in], or [entries, in]
  const int32_t* rows;              // row of x of each entry, or null: its place
  const int32_t *ends, *tile_ends;  // of all experts of the layer
  int64_t all_experts, entries;
  const void* bias;  // T [stack.experts, out] or null
  bool gated;        // gate and up are the halves of out
  Gate gate;
  float alpha, limit;  // for kClamped
  bool interleaved;    // row 2 i is a gate and row 2 i + 1 its up
  void* y;
};
void experts_gemm(const ExpertsGemm& e, Type type, int device, cudaStream_t stream);

// y T [tokens, width] = sum over j < active of weights[token][j] * x[places[token * active + j]], in that order, in
// f32, rounded once.
void experts_sum(const void* x, const int32_t* places, const float* weights, void* y, Type type, int64_t tokens,
                 int active, int64_t width, int device, cudaStream_t stream);

}  // namespace localq
