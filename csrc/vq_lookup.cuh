// vq_gemv: the products themselves, one look-up per code.
//
// A lane is a position. 16 bytes of codes are its codes for the 16 rows of a tile, so a warp loads 512 bytes that lie
// behind each other; one PRMT makes the address of an entry. The sum over positions is the tensor cores' business: a
// looked-up word is a register of operand A of m16n8k16, whose row g are the lanes 4 g .. 4 g + 3, and B is one where
// the word's entry belongs to the column: so the products add up entries of four lanes, and put each row of W (and of
// x) into a column of its own. One accumulator of four registers holds 16 rows of W for one row of x, 8 for two, and so
// on. What is left is the sum over the eight rows of A, by shuffles that halve what a lane has.
//
// With 8 rows of x a table has 16 positions: the upper half of the warp works on the next tile.
#pragma once

#include "vq_gemv.cuh"
#include "vq_machine.cuh"

namespace localq::vq {

// Loads of codes in an item, and tiles.
template <int kRows>
__host__ __device__ constexpr int loads_of_item() {
  return kRows <= 2 ? 2 : 1;
}
template <int kRows>
__host__ __device__ constexpr uint32_t tiles_of_item() {
  return kRows == 8 ? 2 : 1;
}

// The work of a step in items: what one warp does at a time, a tile and the positions of its loads.
struct Work {
  uint32_t items, split;          // split: 1 where an item has half of the words of a table, else 0
  uint32_t groups;                // of kGroup positions; the last may be short
  uint32_t first, last;           // of the block's tiles
  uint32_t book, position, most;  // what lies before the table's codes in a tile, and before the last of the book's
};

template <int kRows>
__device__ __forceinline__ Work work_of(const Arguments& p, const Step& step) {
  Work work = {};
  work.groups = (step.end - step.position + kGroup - 1) / kGroup;
  work.split = kRows == 1 && work.groups > 2;
  work.items = kRows == 8 ? (step.tiles + 1) / 2 : step.tiles << work.split;
  work.first = step.first, work.last = step.first + step.tiles - 1;
  work.book = step.book * p.tiles;
  work.position = p.book[step.book].before + step.position;
  work.most = p.book[step.book].before + step.end - 1;
  return work;
}

// Item `index`: the lane's tile, its half of the words, and how many loads have positions.
struct Item {
  uint32_t tile, half, loads;
};

template <int kRows>
__device__ __forceinline__ Item item_at(const Work& work, uint32_t index) {
  if (kRows == 8) return {work.first + 2 * index + threadIdx.x % 32 / 16, 0, 1};
  const uint32_t half = index & work.split;
  return {work.first + (index >> work.split), half, work.groups - 2 * half};
}

// The lane's codes of an item, if it is one. Lanes without a position have those of the last one: every entry of a
// position that is not there is zero. Lanes without a tile have those of the last one too; nobody takes their sums.
template <int kRows>
__device__ __forceinline__ void load_item(uint4 (&codes)[loads_of_item<kRows>()], const Shared& s, const Work& work,
                                          uint32_t index) {
  if (index >= work.items) return;
  const Item item = item_at<kRows>(work, index);
  const uint8_t* const tile = s.codes[work.book + min(item.tile, work.last)];
  const uint32_t first = work.position + 64 * item.half + threadIdx.x % (kRows == 8 ? 16 : 32);
#pragma unroll
  for (uint32_t i = 0; i < loads_of_item<kRows>(); ++i) {
    if (i != 0 && i >= item.loads) continue;
    codes[i] = __ldcs(reinterpret_cast<const uint4*>(tile) + min(first + kGroup * i, work.most));
  }
}

// Where the codes of the block's tiles begin; all threads.
__device__ __forceinline__ void fill_codes(const Arguments& p, const Span& span, const Shared& s) {
  for (uint32_t i = threadIdx.x; i < p.books * span.tiles; i += kThreads) {
    const uint32_t book = i / span.tiles, tile = i % span.tiles;
    const Place place = place_of(p, span, tile);
    s.codes[book * p.tiles + tile] =
        p.segment[place.segment].codes[book] + uint64_t(place.tile) * p.book[book].tile_bytes;
  }
}

// What a looked-up entry has: registers of operand A.
template <int kRows>
struct Entry {
  uint32_t word[kRows <= 2 ? 1 : kRows / 2];
};

// Byte k of `codes` looked up. Of `column` byte 0 is that of the lane's entry in a row of the table, bytes 2 and 3 are
// 65,536 times the number of the table: so one PRMT makes all of an address but `tables`, which is a part of the load.
template <int kRows, int kSkipped>
__device__ __forceinline__ Entry<kRows> look_up(uint32_t tables, uint32_t column, uint32_t codes, int k) {
  const uint32_t at = tables + __byte_perm(codes, column, 0x7604u | (uint32_t(k) << 4));
  Entry<kRows> entry;
  if constexpr (kRows == 1) {
    load_half<2 * kSkipped>(entry.word, at);
  } else {
    load_words<128 * kSkipped>(entry.word, at);
  }
  return entry;
}

// Operand B: in register q, a one where column g of the product takes the low (or the high) entry of word q.
template <int kRows>
struct Selectors {
  static constexpr int kCount = kRows == 1 ? 8 : 4;
  uint32_t word[kCount];

  __device__ __forceinline__ Selectors() {
    const uint32_t g = fresh_lane() / 4;
#pragma unroll
    for (int q = 0; q < kCount; ++q) {
      if (kRows == 1) {
        word[q] = g == uint32_t(q) ? 0x3c00u : 0u;
      } else {
        word[q] = g / 2 == uint32_t(q) ? (g % 2 ? 0x3c000000u : 0x3c00u) : 0u;
      }
    }
  }
};

// Adds what 16 codes of the lane stand for. Accumulator d has rows 16 / kRows * d .. of the tile, half of them in its
// two upper registers.
template <int kRows, int kSkipped>
__device__ __forceinline__ void add_codes(float (&sum)[kRows][4], uint32_t tables, uint32_t column, uint4 codes,
                                          const Selectors<kRows>& select) {
  constexpr int kEach = 8 / kRows;  // rows of W of half an accumulator
  const uint32_t word[4] = {codes.x, codes.y, codes.z, codes.w};
  constexpr int kWords = kRows <= 2 ? 1 : kRows / 2;
#pragma unroll
  for (int d = 0; d < kRows; ++d) {
    if constexpr (kRows <= 2) {  // two rows of W in a product
#pragma unroll
      for (int j = 0; j < kEach; j += 2) {
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // upper half in registers 1 and 3, the second row in 2 and 3
          const int byte = 2 * kEach * d + i % 2 * kEach + j + i / 2;
          a[i] = look_up<kRows, kSkipped>(tables, column, word[byte / 4], byte % 4).word[0];
        }
        mma(sum[d], a, select.word[j], select.word[j + 1], __half{});
      }
    } else {  // one row of W, two words of its entry in a product
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int low = 2 * kEach * d + j, high = low + kEach;
        const Entry<kRows> first = look_up<kRows, 0>(tables, column, word[low / 4], low % 4);
        const Entry<kRows> second = look_up<kRows, 0>(tables, column, word[high / 4], high % 4);
#pragma unroll
        for (int k = 0; k < kWords; k += 2) {
          const uint32_t a[4] = {first.word[k], second.word[k], first.word[k + 1], second.word[k + 1]};
          mma(sum[d], a, select.word[kWords * j + k], select.word[kWords * j + k + 1], __half{});
        }
      }
    }
  }
}

// The sum of an accumulator over the lanes with the same t (and, with 8 rows of x, in the same half of the warp): of
// its four registers each lane is left with the one that its bits kUpper and kOdd say.
template <int kRows>
__device__ __forceinline__ float folded(const float (&c)[4]) {
  constexpr uint32_t kUpper = kRows == 8 ? 8 : 16, kOdd = kUpper / 2;
  const uint32_t lane = threadIdx.x % 32;
  const bool upper = lane & kUpper, odd = lane & kOdd;
  float kept[2] = {upper ? c[2] : c[0], upper ? c[3] : c[1]};
  kept[0] += __shfl_xor_sync(~0u, upper ? c[0] : c[2], kUpper);
  kept[1] += __shfl_xor_sync(~0u, upper ? c[1] : c[3], kUpper);
  float sum = odd ? kept[1] : kept[0];
  sum += __shfl_xor_sync(~0u, odd ? kept[0] : kept[1], kOdd);
  if (kRows != 8) sum += __shfl_xor_sync(~0u, sum, 4);
  return sum;
}

// Where in its tile's sums [16][kRows] what folded() leaves of accumulator d belongs.
template <int kRows>
__device__ __forceinline__ uint32_t place_of_sum(uint32_t d) {
  const uint32_t lane = threadIdx.x % 32, t = lane % 4;
  const uint32_t upper = lane / (kRows == 8 ? 8 : 16) % 2, odd = lane / (kRows == 8 ? 4 : 8) % 2;
  if (kRows == 1) return 8 * upper + 2 * t + odd;
  if (kRows == 2) return (8 * d + 4 * upper + t) * 2 + odd;
  if (kRows == 4) return (4 * d + 2 * upper + t / 2) * 4 + 2 * (t % 2) + odd;
  return (2 * d + upper) * 8 + 2 * t + odd;
}

// One item: its codes looked up in table `number` and added to the block's sums. No other warp has this tile and half
// in this step.
template <int kRows>
__device__ __forceinline__ void add_item(const Arguments& p, const Shared& s, uint32_t number, const Work& work,
                                         const Item& item, const uint4 (&codes)[loads_of_item<kRows>()],
                                         const Selectors<kRows>& select) {
  const uint32_t lane = threadIdx.x % 32, tables = shared_address(s.tables);
  const uint32_t byte = kRows <= 2 ? 4 * lane + 128 * item.half : kRows == 4 ? 8 * lane : 16 * (lane % 16);
  const uint32_t column = number << 16 | byte;
  float sum[kRows][4] = {};
  add_codes<kRows, 0>(sum, tables, column, codes[0], select);
  if constexpr (kRows <= 2) {
    if (item.loads > 1) add_codes<kRows, 1>(sum, tables, column, codes[1], select);
  }
  float* const sums = s.sums + (item.half * p.tiles + item.tile) * (kTile * kRows);
  const bool mine = kRows == 8 ? item.tile <= work.last : lane / 4 % 2 == 0;
#pragma unroll
  for (int d = 0; d < kRows; ++d) {
    const float part = folded<kRows>(sum[d]);
    if (mine) sums[place_of_sum<kRows>(d)] += part;
  }
}

// The codes of the warp's next two items; they take turns.
template <int kRows>
struct Ring {
  uint4 codes[2][loads_of_item<kRows>()];
};

// The first items of a step.
template <int kRows>
__device__ __forceinline__ void fill(Ring<kRows>& ring, const Arguments& p, const Shared& s, const Step& step) {
  const Work work = work_of<kRows>(p, step);
#pragma unroll
  for (int k = 0; k < 2; ++k) load_item<kRows>(ring.codes[k], s, work, warp_number() + k * kWarps);
}

// All items of the warp in `step`, whose table is number `number`. The ring holds the first two, and is left with the
// first two of `next`.
template <int kRows>
__device__ __forceinline__ void add_step(const Arguments& p, const Shared& s, uint32_t number, const Step& step,
                                         const Step& next, Ring<kRows>& ring) {
  const Selectors<kRows> select;
  const uint32_t warp = warp_number();
  const Work work = work_of<kRows>(p, step), after = work_of<kRows>(p, next);
#pragma unroll 1
  for (uint32_t begin = 0; begin < work.items; begin += 2 * kWarps) {
#pragma unroll
    for (uint32_t k = 0; k < 2; ++k) {
      const uint32_t now = begin + k * kWarps + warp;
      if (now < work.items) {
        add_item<kRows>(p, s, number, work, item_at<kRows>(work, now), ring.codes[k], select);
      } else if (begin != 0) {
        continue;  // its place in the ring has what comes next already
      }
      if (now + 2 * kWarps < work.items) {
        load_item<kRows>(ring.codes[k], s, work, now + 2 * kWarps);
      } else {
        load_item<kRows>(ring.codes[k], s, after, warp + k * kWarps);
      }
    }
  }
}

}  // namespace localq::vq
