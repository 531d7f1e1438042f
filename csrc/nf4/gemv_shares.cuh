// nf4_gemv of one row with equal shares: every block takes the same number of items, and blocks that share a unit join.
//
// The items of a launch are numbered unit by unit, tile by tile, chunk by chunk, and block b takes the b-th run of
// them. A unit belongs to the block in whose run it begins. Every other block that has items of it has them at the
// beginning of its run: it multiplies them first and leaves their sums as words of the workspace, item by item. The
// owner, which multiplies its part of the unit last, copies these words to where the sums would lie if it had all
// items, and adds all chunks in column order. So the result has the bits of a launch with whole units, on any number of
// blocks.
//
// A block waits only for later blocks, after its last item; nothing waits before it has left its words. All blocks run
// at once: a launch has at most as many as multiprocessors.
#pragma once

#include "common/exchange.cuh"
#include "nf4/gemv_kernel.cuh"

namespace localq::nf4_row {

// The cut of a launch; the host divides. Inverses are 2^32 over the number, rounded up.
struct Shares {
  uint32_t each, more;                    // items of a block; the first `more` blocks have one more
  uint32_t unit;                          // items of a unit
  uint32_t inverse_unit, inverse_chunks;  // of `unit` and of Nf4Gemv::chunks
  uint32_t* words;                        // [items][kTile], the workspace
};

// n / d by the inverse of d; n * d < 2^32.
__device__ __forceinline__ uint32_t over(uint32_t n, uint32_t inverse) {
  return uint32_t(uint64_t(n) * inverse >> 32);
}

// The share of a block. Its items are counted from the beginning of its first unit.
struct Share {
  uint32_t first, units;  // units that it has items of
  uint32_t begin, end;    // its items
};

__device__ __forceinline__ Share share_of(const Shares& all) {
  const uint32_t block = blockIdx.x, begin = all.each * block + min(block, all.more);
  Share own;
  own.first = over(begin, all.inverse_unit);
  own.begin = begin - own.first * all.unit;
  own.end = own.begin + all.each + (block < all.more);
  own.units = over(own.end + all.unit - 1, all.inverse_unit);
  return own;
}

// What is looked up of the share after its beginning, in shared memory: the loop over items has no registers for it.
struct alignas(16) Bounds {
  uint32_t end;      // of the items
  uint32_t left;     // items below belong to an earlier block's unit
  uint32_t missing;  // end of the items that later blocks leave; `end` if there are none
  uint32_t whole;    // kRagged: end of the whole chunks, counted through those of all tiles
  uint32_t brief;    // kRagged: the first tile whose short chunk is in the share
  uint32_t* words;   // for item 0
};

__device__ __forceinline__ Bounds bounds_of(const Shares& all, const Share& own, uint32_t chunks) {
  Bounds bounds;
  const uint32_t tile = over(own.end, all.inverse_chunks);
  bounds.end = own.end;
  bounds.left = own.begin == 0 ? 0 : all.unit;
  bounds.missing = own.units * all.unit <= bounds.left ? own.end : own.units * all.unit;
  bounds.whole = tile * (chunks - 1) + own.end - tile * chunks;
  bounds.brief = over(own.begin, all.inverse_chunks);
  bounds.words = all.words + own.first * all.unit * kTile;
  return bounds;
}

// Bounds lie before the tile table, at an address that is no constant: with one, ptxas adds the address of the look-up
// table in every look-up. volatile: read where they are needed, not kept.
__device__ __forceinline__ volatile Bounds& bounds_in(const Shared& s) {
  return reinterpret_cast<volatile Bounds*>(s.tiles.range)[-1];
}

__device__ __forceinline__ void store(const Bounds& bounds, const Shared& s) {
  reinterpret_cast<Bounds*>(s.tiles.range)[-1] = bounds;
}

// The first item of a warp; `inside` is false where it has none.
template <Order kOrder>
__device__ __forceinline__ Cursor first_of(const Shares& all, const Share& own, const Bounds& bounds, uint32_t warp,
                                           uint32_t chunks, bool& inside) {
  Cursor cursor;
  if (kOrder != Order::kRagged) {
    cursor.tile = over(own.begin + warp, all.inverse_chunks);
    cursor.chunk = own.begin + warp - cursor.tile * chunks;
  } else {
    cursor.tile = bounds.brief, cursor.chunk = own.begin - bounds.brief * chunks;
    cursor.skip(warp, chunks, bounds.whole, bounds.brief);
  }
  inside = cursor.tile * chunks + cursor.chunk < own.end;
  return cursor;
}

// The item of the warp after the one at the cursor.
template <Order kOrder>
__device__ __forceinline__ Item next_in_share(const Nf4Gemv& p, const Shared& s, Cursor& cursor) {
  const volatile Bounds& bounds = bounds_in(s);
  if (kOrder == Order::kRagged && cursor.chunk + 1 != p.chunks) {
    cursor.skip(kWarps, p.chunks, bounds.whole, bounds.brief);
  } else {
    cursor.advance<kOrder>(p.chunks, 0);
  }
  TilePlace place = s.tiles.places[cursor.tile];
  if (cursor.tile * p.chunks + cursor.chunk >= bounds.end) place = kNowhere;
  return item_at<kOrder>(p, place, cursor.chunk);
}

// Stores the sums of rows g and g + 8 of an item at s.partial + at, or leaves them for the block that owns the unit.
__device__ __forceinline__ void store_sums(const Shared& s, uint32_t at, const float (&sum)[2]) {
  const volatile Bounds& bounds = bounds_in(s);
  if (at >= bounds.left * kTile) {
    s.partial[at] = sum[0], s.partial[at + 8] = sum[1];
    return;
  }
  uint32_t* const words = bounds.words + at;
  put(words, word_of(sum[0])), put(words + 8, word_of(sum[1]));
}

// Copies what later blocks left of the block's last unit to where its own sums are. The last warps have the fewest
// items and begin.
__device__ __forceinline__ void collect(const Shared& s) {
  const volatile Bounds& bounds = bounds_in(s);
  const uint32_t end = bounds.missing * kTile, rank = kThreads - 32 - threadIdx.x / 32 * 32 + threadIdx.x % 32;
  uint32_t* const words = bounds.words;
#pragma unroll 1
  for (uint32_t i = bounds.end * kTile + 4 * rank; i < end; i += 4 * kThreads) {
    uint4 four = get_four(words + i);
    while (four.x == kVacant || four.y == kVacant || four.z == kVacant || four.w == kVacant) four = get_four(words + i);
    *reinterpret_cast<uint4*>(words + i) = make_uint4(kVacant, kVacant, kVacant, kVacant);
    const uint32_t sums[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) s.partial[i + k] = __uint_as_float(sums[k]);
  }
}

}  // namespace localq::nf4_row
