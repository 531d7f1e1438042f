// What the kernels of prefill.cu share: the workspace, tiles of 64 tokens, operands of tensor cores, f32 in two halves.
#pragma once

#include "common/launch.h"
#include "common/mma.cuh"
#include "delta/delta.h"
#include "delta/functions.cuh"
#include "delta/intrinsics.cuh"

namespace localq::delta {

constexpr int kChunk = 64;                                 // tokens
constexpr int kBlock = 16;                                 // tokens of a block of the system
constexpr int kBlocks = kChunk / kBlock;                   // in each direction
constexpr int kLowerBlocks = kBlocks * (kBlocks + 1) / 2;  // on and below the diagonal
constexpr int kTile = kChunk * kDeltaDim;                  // values of q, k or v of a head
constexpr int kWordsOfRow = kDeltaDim / 8;                 // 16-byte words
constexpr int kGroups = kDeltaDim / 16;                    // of 16 keys or values
constexpr int kWarpWords = 32;                             // 16-byte words that a warp reads at once

// Factors of the tokens of a chunk and head.
struct Factors {
  float out[kChunk];    // of what the state gives to q: exp(G) / |q| / sqrt(128)
  float until[kChunk];  // of what a token writes, at the end of the chunk: exp(G_last - G) / |k|
  float kept[4];        // of the state: exp(G_last); the others are padding
};

// The workspace for `chunks` chunks. "Halves" are two T whose sum is an f32, all high ones before all low ones;
// operands B lie in the order in which lanes take them.
//   tiles     T [chunks, 2 H + H R, 64, 128]    q, k and v, zeros behind the last token; rows as `word_of` has them
//   writes    f32 [chunks, H R, 8 groups of values, 8 of tokens, 32 lanes, 4]    sums of U^T
//   reads     halves [chunks, H R, 2, 8 groups of keys, 4 blocks of tokens, 32 lanes, 8]    operands B of -W
//   scores    halves [chunks, H R, 2, 10 blocks, 32 lanes, 8]    operands B of q k^T D
//   factors   [chunks, H R]
struct Workspace {
  uint8_t *tiles, *writes, *reads, *scores, *factors;

  static constexpr int kTileBytes = 2 * kTile, kWritesBytes = 4 * kTile, kReadsBytes = 4 * kTile;
  static constexpr int kScoresBytes = 2 * kLowerBlocks * kWarpWords * 16, kFactorsBytes = sizeof(Factors);
  static constexpr int kHeadBytes = kWritesBytes + kReadsBytes + kScoresBytes + kFactorsBytes;

  __host__ __device__ __forceinline__ Workspace(void* all, int64_t chunks, int key_heads, int heads) {
    tiles = static_cast<uint8_t*>(all);
    writes = tiles + chunks * (2 * key_heads + heads) * kTileBytes;
    reads = writes + chunks * heads * kWritesBytes;
    scores = reads + chunks * heads * kReadsBytes;
    factors = scores + chunks * heads * kScoresBytes;
  }
};
static_assert(sizeof(Factors) % 16 == 0);

// Where the 16-byte word `word` of a row of a tile lies: rows that follow each other use different banks.
__device__ __forceinline__ int word_of(int row, int word) {
  return row * kWordsOfRow + (word ^ row % 8);
}

// The place of a block (i, j) of 16 x 16 tokens, j <= i, among those on and below the diagonal.
__device__ __forceinline__ constexpr int lower(int i, int j) {
  return i * (i + 1) / 2 + j;
}

__device__ __forceinline__ float2 unpacked(uint32_t pair, __half) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}
__device__ __forceinline__ float2 unpacked(uint32_t pair, __nv_bfloat16) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
__device__ __forceinline__ float within(float x, __half) {
  return fminf(fmaxf(x, -65504.f), 65504.f);
}
__device__ __forceinline__ float within(float x, __nv_bfloat16) {
  return x;
}

// x and y as the sum of two pairs of T: 22 bits in f16 (to 131,008, and not below 2^-25), 16 bits in bf16.
template <typename T>
__device__ __forceinline__ void split(float x, float y, uint32_t& high, uint32_t& low) {
  high = pack(within(x, T()), within(y, T()), T());
  const float2 found = unpacked(high, T());
  low = pack(x - found.x, y - found.y, T());
}

// Operand A of m16n8k16 in two halves.
struct Split {
  uint32_t high[4], low[4];
};

// The sums of two m16n8k16 beside each other, [16, 16], as operand A of a product over their columns.
template <typename T>
__device__ __forceinline__ Split split(const float (&left)[4], const float (&right)[4]) {
  Split to;
  split<T>(left[0], left[1], to.high[0], to.low[0]);
  split<T>(left[2], left[3], to.high[1], to.low[1]);
  split<T>(right[0], right[1], to.high[2], to.low[2]);
  split<T>(right[2], right[3], to.high[3], to.low[3]);
  return to;
}

// Rows of a tile as operand A [16 rows, 16 columns], or as operands B of two products [16 columns, 8 rows each].
template <typename T>
__device__ __forceinline__ void load_a(uint32_t (&to)[4], const T* tile, int first_row, int word, int lane) {
  load_matrices(to, tile + 8 * word_of(first_row + lane % 16, word + lane / 16));
}
template <typename T>
__device__ __forceinline__ void load_b(uint32_t (&to)[4], const T* tile, int first_row, int word, int lane) {
  load_matrices(to, tile + 8 * word_of(first_row + lane % 8 + lane / 16 * 8, word + lane / 8 % 2));
}
// Operands B of two products over rows: [16 rows, 8 columns each].
template <typename T>
__device__ __forceinline__ void load_b_of_rows(uint32_t (&to)[4], const T* tile, int first_row, int word, int lane) {
  load_transposed(to, tile + 8 * word_of(first_row + lane % 16, word + lane / 16));
}

// Copies kWords 16-byte words to shared memory by all threads of a block of kThreads.
template <int kThreads, int kWords>
__device__ __forceinline__ void copy_words(void* to, const void* from) {
  uint8_t* const here = static_cast<uint8_t*>(to) + 16 * threadIdx.x;
  const uint8_t* const there = static_cast<const uint8_t*>(from) + 16 * threadIdx.x;
#pragma unroll
  for (int i = 0; i < kWords; i += kThreads) {
    if (kWords % kThreads == 0 || i + threadIdx.x < kWords) copy_async(here + 16 * i, there + 16 * i);
  }
}

// What a launch of the kernels takes: `pass`, of which it computes the tokens from `first` on, in `count` chunks.
struct Part {
  int first, count;
};

}  // namespace localq::delta
