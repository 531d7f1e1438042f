// nf4_gemv for one row of x: the shared memory of a block, x in it, and the order of a warp's items.
#pragma once

#include "nf4/gemv_pipeline.cuh"

namespace localq::nf4_row {

constexpr int kWarps = 16, kThreads = 32 * kWarps;

// Shared memory of a block: the look-up table, kWarps floats, x, the tile table, the partial sums.
struct Layout {
  uint32_t tiles;    // per block, at most
  uint32_t x_bytes;  // 0: x stays in global memory

  __host__ __device__ uint32_t bytes(uint32_t blocks, uint32_t chunks) const {
    return kTableBytes + 4 * kWarps + x_bytes + TileTable::bytes(tiles, blocks) + 4 * tiles * chunks * kTile;
  }
};

struct Shared {
  uint8_t* table;
  float* scratch;  // [kWarps]
  uint8_t* x;      // 16-byte words of x in the order of x_word, or null
  TileTable tiles;
  float* partial;  // [tiles][chunks][kTile]
};

// kSpare: bytes before the tile table.
template <uint32_t kSpare = 0>
__device__ __forceinline__ Shared carve(uint8_t* memory, const Layout& layout, uint32_t blocks) {
  uint8_t* const x = memory + kTableBytes + 4 * kWarps;
  uint8_t* const rest = x + layout.x_bytes + kSpare;
  return {memory, reinterpret_cast<float*>(memory + kTableBytes), layout.x_bytes == 0 ? nullptr : x,
          TileTable(rest, layout.tiles, blocks),
          reinterpret_cast<float*>(rest + TileTable::bytes(layout.tiles, blocks))};
}

// The position of word i (8 values) of x in shared memory, chosen so that both loads of x_operand are free of bank
// conflicts.
__device__ __forceinline__ uint32_t x_word(uint32_t i) {
  const uint32_t block = i / 8, t = i % 8 / 2, half = i % 2;
  return block / 2 * 16 + half * 8 + block % 2 * 4 + t;
}

// Copies x to shared memory in that order, with its norm if there is one. Called by all threads.
template <typename T>
__device__ void stage(const Nf4Gemv& p, const Shared& s, const T* x) {
  auto* staged = reinterpret_cast<Eight<T>*>(s.x);
  const auto* from = reinterpret_cast<const Eight<T>*>(x);
  const uint32_t words = p.blocks * 8;
  float squares = 0.f;
#pragma unroll 2
  for (uint32_t i = threadIdx.x; i < words; i += kThreads) {
    const Eight<T> eight = from[i];
    staged[x_word(i)] = eight;
#pragma unroll
    for (int k = 0; k < 8; ++k) squares += to_float(eight.value[k]) * to_float(eight.value[k]);
  }
  if (p.extras.norm == NormKind::kNone) return;
  const float inverse_rms = rsqrtf(block_sum(squares, s.scratch) / (p.blocks * kBlock) + p.extras.eps);
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < words; i += kThreads) {  // each thread its own words
    Eight<T> eight = staged[x_word(i)];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      eight.value[k] = normed(eight.value[k], inverse_rms, p.extras.norm_weight, 8 * i + k, p.extras.norm);
    }
    staged[x_word(i)] = eight;
  }
}

// x of the lane's columns of `block`: the operand B of a product.
template <typename T>
__device__ __forceinline__ void x_operand(uint32_t (&b)[8], const Shared& s, const T* x, uint32_t block) {
  const uint32_t t = threadIdx.x % 4;
  uint4 words[2];
  if (s.x != nullptr) {
    const auto* staged = reinterpret_cast<const uint4*>(s.x) + block / 2 * 16 + block % 2 * 4 + t;
    words[0] = staged[0];
    words[1] = staged[8];
  } else {
    const auto* from = reinterpret_cast<const uint4*>(x) + block * 8 + 2 * t;
    words[0] = from[0];
    words[1] = from[1];
  }
  b[0] = words[0].x, b[1] = words[0].y, b[2] = words[0].z, b[3] = words[0].w;
  b[4] = words[1].x, b[5] = words[1].y, b[6] = words[1].z, b[7] = words[1].w;
}

// The position of a warp in the items of its block. Warps take items round-robin, tile by tile; in order kRagged first
// the whole chunks of all tiles, then the short ones, so that the short ones are spread evenly.
struct Cursor {
  uint32_t tile, chunk;

  template <Order kOrder>
  __device__ __forceinline__ void advance(uint32_t chunks, uint32_t tiles) {
    if (kOrder != Order::kRagged) {
      chunk += kWarps;
      while (chunk >= chunks) chunk -= chunks, ++tile;
      return;
    }
    const uint32_t whole = chunks - 1;
    if (chunk == whole) {
      tile += kWarps;
      return;
    }
    chunk += kWarps;
    while (chunk >= whole) chunk -= whole, ++tile;
    if (tile >= tiles) tile = (tile - tiles) * whole + chunk, chunk = whole;
  }

  // kRagged in equal shares: `items` whole chunks on, or the short one of tile `brief` and of those behind it once the
  // whole ones end, at number `end`.
  __device__ __forceinline__ void skip(uint32_t items, uint32_t chunks, uint32_t end, uint32_t brief) {
    const uint32_t whole = chunks - 1;
    chunk += items;
    while (chunk >= whole) chunk -= whole, ++tile;
    const uint32_t number = tile * whole + chunk;
    if (number >= end) tile = brief + number - end, chunk = whole;
  }
};

template <Order kOrder>
__device__ __forceinline__ Cursor first_of(uint32_t warp, uint32_t chunks, uint32_t tiles) {
  if (kOrder != Order::kRagged) return {warp / chunks, warp % chunks};
  const uint32_t whole = chunks - 1;
  if (warp >= tiles * whole) return {warp - tiles * whole, whole};
  return {warp / whole, warp % whole};
}

}  // namespace localq::nf4_row
