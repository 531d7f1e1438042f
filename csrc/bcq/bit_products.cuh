// bcq_gemv: the products, of bits with bits.
//
// A unit is one plane of one block of 128 columns of a tile: the lane (g, t) has 32 signs of rows g and g + 8, operand
// A of m16n8k128, as they are stored. Two products with a row of x count its bits 0 .. 7 and 8 .. 15 where the sign is
// a plus; the lane is left with four bits of both rows, and adds up what they are worth, times the plane's scale.
//
// Of groups that are less than a block each word counts by itself: eight products with two bits of x each, where a word
// has two of the eight columns of B and zeros in the others, so that the lane (g, t) is left with all bits of word t.
#pragma once

#include "bcq/activations.cuh"
#include "bcq/gemv.cuh"

namespace localq::bcq {

// How groups of columns that share scales lie to blocks of 128.
enum class Groups { kBlock, kBlocks, kWords };  // a block each, several blocks or all, or one or two words of a block

// Units that are asked for together. One batch is under way while another is multiplied: ptxas gives all loads of codes
// one scoreboard, so what waits for one batch waits for all that is under way, and none may have been asked for late.
template <int kRows, Groups kGroups>
__host__ __device__ constexpr int units_of_batch() {
  if (kGroups == Groups::kWords) return kRows == 1 ? 8 : kRows == 2 ? 4 : kRows == 4 ? 2 : 1;
  return kRows <= 2 ? 8 : 4;
}

// The blocks of columns of a tile that are the warp's, of those whose x is in shared memory; blocks of the matrix.
struct Range {
  uint32_t begin, end;
};

template <int kRows, Groups kGroups>
struct Batch {
  uint2 codes[units_of_batch<kRows, kGroups>()];
  uint32_t scales[units_of_batch<kRows, kGroups>()];  // of rows g and g + 8; where words differ, of word t
};

// What the warp asks for next: where the lane's part is, in which block and plane, and units from there to the end of
// the range in this tile; none behind the last tile.
struct Cursor {
  uint32_t tile, left, block, plane;
  const uint8_t* codes;
  const uint8_t* scales;  // of the tile; with a block a group, of the unit
};

// Bytes from the scales of one group to those of the next.
__device__ __forceinline__ uint32_t group_bytes(const Arguments& p) {
  return p.planes * kScaleBytes;
}

// To the first unit of the warp in the cursor's tile.
template <Groups kGroups>
__device__ __forceinline__ void enter_tile(const Arguments& p, const vq::Span& span, const Shared& s,
                                           const Range& range, Cursor& at) {
  const uint32_t lane = threadIdx.x % 32;
  const Tile& tile = s.tiles[min(at.tile, span.tiles - 1)];
  at.left = at.tile < span.tiles ? (range.end - range.begin) * p.planes : 0;
  at.block = range.begin, at.plane = 0;
  at.codes = tile.codes + range.begin * p.planes * kUnitBytes + lane * 8;
  at.scales = tile.scales + lane / 4 * 4;
  if (kGroups == Groups::kBlock) at.scales += range.begin * group_bytes(p);
}

// Where the scales of the cursor's unit are, or of its word t.
template <Groups kGroups>
__device__ __forceinline__ const uint8_t* scales_of(const Arguments& p, const Cursor& at) {
  const uint32_t group = kGroups == Groups::kBlocks
                             ? at.block >> p.block_shift
                             : min((at.block * kWords + threadIdx.x % 4) >> p.word_shift, p.groups - 1);
  return at.scales + group * group_bytes(p) + at.plane * kScaleBytes;
}

// Asks for the next batch: not before that of which `zero` is made is there. No branch between loads, for where paths
// meet ptxas waits for what either has asked for.
template <int kRows, Groups kGroups>
__device__ __forceinline__ void load_batch(Batch<kRows, kGroups>& batch, const Arguments& p, const vq::Span& span,
                                           const Shared& s, const Range& range, Cursor& at, uint32_t zero) {
  constexpr uint32_t kUnits = units_of_batch<kRows, kGroups>();
  at.codes += zero, at.scales += zero;
#pragma unroll
  for (uint32_t i = 0; i < kUnits; ++i) {
    const bool some = i < at.left;
    load_codes(batch.codes[i], at.codes + i * kUnitBytes, some);
    if constexpr (kGroups == Groups::kBlock) {
      load_scales(batch.scales[i], at.scales + i * kScaleBytes, some);
    } else {
      load_scales(batch.scales[i], scales_of<kGroups>(p, at), some);
      const bool last = ++at.plane == p.planes;
      at.block += last, at.plane = last ? 0 : at.plane;
    }
  }
  at.codes += kUnits * kUnitBytes;
  if (kGroups == Groups::kBlock) at.scales += kUnits * kScaleBytes;
  at.left -= min(kUnits, at.left);
  if (at.left != 0) return;
  at.tile += kWarps >> p.split_log;
  enter_tile<kGroups>(p, span, s, range, at);
}

// Sums of rows g and g + 8 of the lane's tile, for each row of x.
template <int kRows>
using Sums = float[kRows][2];

// What a row of x has for a block of columns: operands B, and what the lane's counts are worth.
template <Groups kGroups>
struct XBlock {
  uint32_t bits[kGroups == Groups::kWords ? kBits / 2 : 2];
  Worth worth;
};

template <Groups kGroups>
__device__ __forceinline__ void load_block(XBlock<kGroups>& x, const uint8_t* from) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  x.worth = reinterpret_cast<const Worth*>(from + 2 * kColumns)[t];
  if constexpr (kGroups == Groups::kWords) {
    x.worth.factor *= __int_as_float((127 - 2 * t) << 23);  // all bits of a word are the lane's
#pragma unroll
    for (uint32_t i = 0; i < kBits / 4; ++i) {  // planes 2 i + g % 2, and 8 behind them
      const uint2 both = load_bits(from + ((2 * i + g % 2) * kWords + t) * 8);
      x.bits[i] = t == g / 2 ? both.x : 0, x.bits[i + kBits / 4] = t == g / 2 ? both.y : 0;
    }
  } else {
    const uint2 both = load_bits(from + lane * 8);
    x.bits[0] = both.x, x.bits[1] = both.y;
  }
}

__device__ __forceinline__ float scale_at(uint32_t scales, int h) {
  const uint16_t bits = uint16_t(h == 0 ? scales & 0xffffu : scales >> 16);
  return __half2float(reinterpret_cast<const __half&>(bits));
}

// What the lane counts in rows g and g + 8, by the bits that it has of x. `sign`: what bit 15 is worth over bit 14 in
// the lane, that is 2, or -2 where it is x's sign.
template <Groups kGroups, bool kBytes>
__device__ __forceinline__ void count_unit(int (&count)[2], const uint2& codes, const XBlock<kGroups>& x, int sign) {
  if constexpr (kGroups == Groups::kWords) {
    count[0] = count[1] = 0;
#pragma unroll
    for (int i = kBits / 2 - 1; i >= 0; --i) {
      int two[4] = {};
      count_bits<false>(two, codes.x, codes.y, x.bits[i]);
      const int upper = i == kBits / 2 - 1 ? -2 : 2;
#pragma unroll
      for (int h = 0; h < 2; ++h) count[h] = count[h] * 4 + two[2 * h] + upper * two[2 * h + 1];
    }
  } else {
    int low[4] = {}, high[4] = {};
    count_bits<kBytes>(low, codes.x, codes.y, x.bits[0]);
    count_bits<kBytes>(high, codes.x, codes.y, x.bits[1]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      count[h] = (high[2 * h] + sign * high[2 * h + 1]) * 256 + low[2 * h] + 2 * low[2 * h + 1];
    }
  }
}

template <Groups kGroups, bool kBytes>
__device__ __forceinline__ void add_unit(float (&total)[2], const uint2& codes, uint32_t scales,
                                         const XBlock<kGroups>& x, int sign) {
  int count[2];
  count_unit<kGroups, kBytes>(count, codes, x, sign);
#pragma unroll
  for (int h = 0; h < 2; ++h) total[h] += scale_at(scales, h) * (float(count[h]) * x.worth.factor - x.worth.sum);
}

// Adds the warp's sums of a tile to its shares, and begins anew: those of four lanes are one.
template <int kRows>
__device__ __forceinline__ void leave_share(Sums<kRows>& total, float* share) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const bool odd = t % 2;
    float sum = odd ? total[r][1] : total[r][0];
    sum += __shfl_xor_sync(~0u, odd ? total[r][0] : total[r][1], 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (t < 2) share[(g + 8 * t) * kRows + r] += sum;
    total[r][0] = total[r][1] = 0.f;
  }
}

// What a warp has done: the unit that comes next, and sums of its tile. `x`, `share`: the lane's, where its bits of the
// block and its sums of the tile are.
template <int kRows, Groups kGroups>
struct Work {
  uint32_t tile, block, plane;
  const uint8_t* x;
  float* share;
  XBlock<kGroups> of_block[kRows];
  Sums<kRows> total;
};

// The units of a batch from kFirst on, up to where the warp's part of a tile ends. By recursion: a loop with so much in
// it would not be unrolled everywhere, and the batch would not be in registers.
template <int kFirst, int kRows, Groups kGroups>
__device__ __forceinline__ void add_units(Work<kRows, kGroups>& work, const Batch<kRows, kGroups>& batch,
                                          const Arguments& p, const Range& range, int sign) {
  if constexpr (kFirst < units_of_batch<kRows, kGroups>()) {
    constexpr bool kHeavy = kRows > (kGroups == Groups::kWords ? 1 : 2);  // registers do not hold x for all planes
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      XBlock<kGroups>& x = work.of_block[kHeavy ? 0 : r];
      if (kHeavy || work.plane == 0) load_block<kGroups>(x, work.x + r * kXBytes);
      add_unit<kGroups, kRows <= 2>(work.total[r], batch.codes[kFirst], batch.scales[kFirst], x, sign);
    }
    if (++work.plane == p.planes) {
      work.plane = 0;
      work.x += kRows * kXBytes;
      if (++work.block == range.end) return;
    }
    add_units<kFirst + 1>(work, batch, p, range, sign);
  }
}

// All units of a batch. Where a tile ends, its share is left.
template <int kRows, Groups kGroups>
__device__ __forceinline__ void add_batch(Work<kRows, kGroups>& work, const Batch<kRows, kGroups>& batch,
                                          const Arguments& p, const Range& range, int sign) {
  add_units<0>(work, batch, p, range, sign);
  if (work.block < range.end) return;
  leave_share<kRows>(work.total, work.share);
  work.x -= (range.end - range.begin) * (kRows * kXBytes);
  work.share += kWarps * kTile * kRows;
  work.block = range.begin, work.tile += kWarps >> p.split_log;
}

// The zero points of the warp's blocks of a tile times sums of x; they lie behind the scales of all planes. `x`: the
// lane's, of the range's first block.
template <int kRows, Groups kGroups>
__device__ __forceinline__ void add_zeros(Sums<kRows>& total, const Arguments& p, const Shared& s, const Range& range,
                                          const uint8_t* x, uint32_t tile) {
  const uint32_t t = threadIdx.x % 4;
  const uint8_t* const zeros = s.tiles[tile].scales + p.groups * group_bytes(p) + threadIdx.x % 32 / 4 * 4;
#pragma unroll 4
  for (uint32_t block = range.begin; block < range.end; ++block) {
    const uint32_t word = kWords * block + t;
    const uint32_t group = kGroups == Groups::kWords ? min(word >> p.word_shift, p.groups - 1) : block >> p.block_shift;
    uint32_t scales = 0;
    load_scales(scales, zeros + group * kScaleBytes, true);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const uint8_t* const from = x + ((block - range.begin) * kRows + r) * kXBytes;
      const float sum = reinterpret_cast<const Worth*>(from + 2 * kColumns)[t].sum;
      total[r][0] += scale_at(scales, 0) * sum, total[r][1] += scale_at(scales, 1) * sum;
    }
  }
}

}  // namespace localq::bcq
