// nf4_gemv: its items, a chunk of a tile each: how a lane reads codes and scales of one while others are multiplied.
//
// An item is quick where its tile is whole and its blocks come through the ring: four loads of 16 bytes a lane are in
// flight, whatever item they belong to. In order kRagged that is true of the last chunk of a row too, which has fewer
// blocks: what is not there is not asked for, the ring keeps older codes in its place, and x is zero there.
#pragma once

#include "nf4/gemv.cuh"

namespace localq {

constexpr int kDepth = kChunk / 2;  // blocks of codes in flight per warp

// How the tiles of a launch lie. kRagged: tiled, and the last chunk of a row has fewer than kChunk blocks.
enum class Order { kRowWise, kTiled, kRagged };

// What the loop over its blocks needs to know of an item.
struct Item {
  const uint8_t* codes;  // of the lane
  uint32_t absmax_codes;
  TilePlace place;
  bool quick;
};

// Blocks of a quick item. (Not a part of Item: that changes the code of whole chunks, where it is a constant.)
template <Order kOrder>
__device__ __forceinline__ uint32_t blocks_of(const Nf4Gemv& p, uint32_t chunk) {
  return kOrder == Order::kRagged ? min(uint32_t(kChunk), p.blocks - chunk * kChunk) : kChunk;
}

// Blocks that the ring can be filled with; of whole chunks only whether there are any.
template <Order kOrder>
__device__ __forceinline__ uint32_t left_of(const Nf4Gemv& p, const Item& item, uint32_t chunk) {
  return kOrder == Order::kRagged && item.quick ? blocks_of<kOrder>(p, chunk) : item.quick;
}

// The stored absmax of a whole tile in the chunk. Of a whole chunk as the
// lane owns them: rows g and g + 8, blocks 2 t and 2 t + 1; one byte each. Of a short one, which lies row by row, word
// `lane` of it, in lanes that have one; in_lanes() turns these into the others.
template <Order kOrder>
__device__ __forceinline__ uint32_t load_absmax_word(const Nf4Gemv& p, const Nf4Segment& w, uint32_t tile,
                                                     uint32_t chunk) {
  const uint32_t lane = threadIdx.x % 32, first = chunk * kChunk;
  if (kOrder != Order::kRowWise) {
    const uint32_t word = kOrder == Order::kRagged ? min(lane, blocks_of<kOrder>(p, chunk) * (kTile / 4) - 1) : lane;
    return __ldcs(static_cast<const uint32_t*>(w.absmax) + uint64_t(tile * p.blocks + first) * (kTile / 4) + word);
  }
  const auto* low = static_cast<const uint8_t*>(w.absmax) + (tile * kTile + lane / 4) * p.blocks + first + lane % 4 * 2;
  const auto* high = low + 8 * p.blocks;
  return low[0] | uint32_t(low[1]) << 8 | uint32_t(high[0]) << 16 | uint32_t(high[1]) << 24;
}

// The absmax codes that the lane owns of a chunk of n < kChunk blocks; those of blocks that are not there are the last
// one's. All lanes.
__device__ __forceinline__ uint32_t in_lanes(uint32_t words, uint32_t n, uint32_t g, uint32_t t) {
  uint32_t own = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t at = (g + i / 2 * 8) * n + min(2 * t + i % 2, n - 1);
    own |= (__shfl_sync(~0u, words, at / 4) >> at % 4 * 8 & 255) << 8 * i;
  }
  return own;
}

template <Order kOrder>
__device__ __forceinline__ Item item_at(const Nf4Gemv& p, TilePlace place, uint32_t chunk) {
  Item item = {};
  item.place = place;
  if (place.word == kNowhere.word) return item;
  const uint32_t lane = threadIdx.x % 32, first = chunk * kChunk, tile = place.tile();
  const Nf4Segment& w = p.segment[place.segment()];
  item.quick = is_full(w, tile) && (kOrder == Order::kRagged || first + kChunk <= p.blocks);
  if (!item.quick) return item;
  if (kOrder != Order::kRowWise) {
    const uint32_t word = tile * p.blocks + first;
    item.codes = w.codes + (uint64_t(word) * kTileWords + lane) * 16;
  } else {
    const uint32_t row = tile * kTile + lane / 4, t = lane % 4;
    item.codes = w.codes + (uint64_t(row) * p.blocks + first) * (kBlock / 2) + 8 * t;
  }
  if (p.nested_map != nullptr) item.absmax_codes = load_absmax_word<kOrder>(p, w, tile, chunk);
  return item;
}

// Bytes between two blocks of a tile as one lane reads them.
template <Order kOrder>
__device__ constexpr uint32_t block_stride() {
  return kOrder == Order::kRowWise ? kBlock / 2 : kTileWords * 16;
}

template <Order kOrder>
__device__ __forceinline__ uint4 load_block(const Nf4Gemv& p, const uint8_t* codes, int u) {
  codes += u * block_stride<kOrder>();
  if (kOrder != Order::kRowWise) return __ldcs(reinterpret_cast<const uint4*>(codes));
  const uint2 low = __ldcs(reinterpret_cast<const uint2*>(codes));
  const uint2 high = __ldcs(reinterpret_cast<const uint2*>(codes + 8 * p.blocks * (kBlock / 2)));
  return make_uint4(low.x, low.y, high.x, high.y);
}

// The ring's place for block i of the `left` ones from `codes` on; of whole chunks all are there, or none.
template <Order kOrder>
__device__ __forceinline__ void refill(uint4& place, const Nf4Gemv& p, const uint8_t* codes, int i, uint32_t left) {
  if (kOrder == Order::kRagged ? uint32_t(i) < left : left != 0) place = load_block<kOrder>(p, codes, i);
}

template <Order kOrder>
__device__ __forceinline__ void load_ring(uint4 (&ring)[kDepth], const Nf4Gemv& p, const Item& item, uint32_t chunk) {
#pragma unroll
  for (int i = 0; i < kDepth; ++i) {
    ring[i] = make_uint4(0, 0, 0, 0);  // so that the ring is not alive through an item that does not use it
    refill<kOrder>(ring[i], p, item.codes, i, left_of<kOrder>(p, item, chunk));
  }
}

// The scales of a quick item that the lane owns: rows g and g + 8, blocks 2 t and 2 t + 1 of the chunk; finite ones
// where there is no such block. `tile` is its number in the block's table, `codes` the look-up table. All lanes.
template <Order kOrder>
__device__ __forceinline__ void decode_scales(float (&scale)[4], const Nf4Gemv& p, const uint8_t* codes,
                                              const TileTable& table, uint32_t tile, uint32_t chunk, const Item& item) {
  const uint32_t lane = fresh_lane(), g = lane / 4, t = lane % 4, block = chunk * kChunk + 2 * t;
  const Nf4Segment& w = p.segment[item.place.segment()];
  if (p.nested_map == nullptr) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t at = kOrder == Order::kRagged ? min(block + i % 2, p.blocks - 1) : block + i % 2;
      scale[i] = load_scale(p, w, item.place.tile(), g + i / 2 * 8, at);
    }
    return;
  }
  uint32_t stored = item.absmax_codes;
  if (kOrder == Order::kRagged) {
    const uint32_t n = blocks_of<kOrder>(p, chunk);
    if (n != kChunk) stored = in_lanes(stored, n, g, t);
  }
  const uint32_t base = item.place.tile() * kTile * p.blocks;
  const float* nested = table.nested + tile * table.stride - base / kNestedBlock;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t flat = base + (g + i / 2 * 8) * p.blocks + block + i % 2;
    const float absmax = __uint_as_float(look_up(codes, 4 * lane + 128, stored, i));
    scale[i] = __fadd_rn(__fmul_rn(absmax, nested[flat / kNestedBlock]), w.offset);
  }
}

}  // namespace localq
