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

#include "lookup/intrinsics.cuh"
#include "lookup/warp_reduce.cuh"

namespace localq::vq {

// Loads of codes in an item: kGroup positions each, together a table's.
template <int kRows>
__host__ __device__ constexpr uint32_t loads_of_item() {
  return kRows == 1 ? 4 : kRows == 2 ? 2 : 1;
}

// The work of a step in items: what one warp does at a time, a tile (with 8 rows of x two) and all positions of the
// table.
template <int kRows>
__device__ __forceinline__ uint32_t items_of(const Step& step) {
  return kRows == 8 ? (step.tiles + 1) / 2 : step.tiles;
}

// The lane's tile of item `index`, counted from the step's first.
template <int kRows>
__device__ __forceinline__ uint32_t tile_of(uint32_t index) {
  return kRows == 8 ? 2 * index + threadIdx.x % 32 / 16 : index;
}

// The codes of an item.
template <int kRows>
struct Codes {
  uint4 load[loads_of_item<kRows>()];
};

// The lane's codes of the tile whose codes begin at `tile`, for table `table` of the step. Lanes without a position
// have those of the last one: every entry of a position that is not there is zero.
template <int kRows>
__device__ __forceinline__ void load_tile(Codes<kRows>& codes, const uint8_t* tile, const Step& step, uint32_t table) {
  constexpr uint32_t kLoads = loads_of_item<kRows>(), kTablePositions = positions_of_table<kRows>();
  const uint32_t first = step.position + kTablePositions * table + threadIdx.x % (kRows == 8 ? 16 : 32);
  const uint32_t positions = step.positions<kRows>(table);
  if (kLoads > 1 && positions >= kLoads * kGroup) {
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i) codes.load[i] = load_codes(tile + 16 * first + 16 * kGroup * i);
    return;
  }
#pragma unroll
  for (uint32_t i = 0; i < kLoads; ++i) {
    if (i > 0 && kGroup * i >= positions) continue;
    codes.load[i] = load_codes(tile + 16 * min(first + kGroup * i, step.most));
  }
}

// The lane's codes of an item for a table of the step, if it is one. Lanes without a tile have those of the last one;
// nobody takes their sums.
template <int kRows>
__device__ __forceinline__ void load_item(Codes<kRows>& codes, const Shared& s, const Step& step, uint32_t index,
                                          uint32_t table = 0) {
  if (index >= items_of<kRows>(step)) return;
  load_tile<kRows>(codes, s.codes[step.codes + min(tile_of<kRows>(index), step.tiles - 1)], step, table);
}

// Steps, and where the codes of the block's tiles begin. All threads; then synchronise.
template <int kRows>
__device__ __forceinline__ void fill(const Arguments& p, const Span& span, const Shared& s) {
  for (uint32_t i = kThreads - 1 - threadIdx.x; i < p.steps; i += kThreads) s.steps[i] = step_at<kRows>(p, span, i);
  for (uint32_t tile = threadIdx.x; tile < span.tiles; tile += kThreads) {
    const Place place = place_of(p, span, tile);
    for (uint32_t book = span.book; book < span.books_end; ++book) {
      s.codes[book * p.tiles + tile] =
          p.segment[place.segment].codes[book] + uint64_t(place.tile) * p.book[book].tile_bytes;
    }
  }
  for (uint32_t i = threadIdx.x; i < span.tiles * kTile * kRows; i += kThreads) s.sums[i] = 0.f;
  if (threadIdx.x < kRows) s.largest[threadIdx.x] = 0;
}

// What a looked-up entry has: registers of operand A.
template <int kRows>
struct Entry {
  uint32_t word[kRows <= 2 ? 1 : kRows / 2];
};

// Byte k of `codes` looked up, kOffset bytes into its row. Of `column` byte 0 is that of the lane's entry in a row of
// the table, bytes 2 and 3 are 65,536 times the number of the table: so one PRMT makes all of an address but `tables`,
// which is a part of the load.
template <int kRows, int kOffset>
__device__ __forceinline__ Entry<kRows> look_up(uint32_t tables, uint32_t column, uint32_t codes, int k) {
  const uint32_t at = tables + __byte_perm(codes, column, 0x7604u | (uint32_t(k) << 4));
  Entry<kRows> entry;
  if constexpr (kRows == 1) {
    load_half<kOffset>(entry.word, at);
  } else {
    load_words<kOffset>(entry.word, at);
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

// Adds what 16 codes of the lane stand for, with two rows of x and more (with one: add_groups). A lane's accumulators
// have the same rows of the tile for any kRows, but for how many they are: 4 t .. with one or two rows of x, 8 (t / 2)
// .. with four, all with eight; see place_of_sum().
template <int kRows, int kOffset>
__device__ __forceinline__ void add_codes(float (&sum)[kRows][4], uint32_t tables, uint32_t column, uint4 codes,
                                          const Selectors<kRows>& select) {
  constexpr int kEach = 8 / kRows;  // rows of W of half an accumulator
  const uint32_t word[4] = {codes.x, codes.y, codes.z, codes.w};
  constexpr int kWords = kRows / 2;
#pragma unroll
  for (int d = 0; d < kRows; ++d) {
    if constexpr (kRows == 2) {  // two rows of W in a product
#pragma unroll
      for (int j = 0; j < kEach; j += 2) {
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // upper half in registers 1 and 3, the second row in 2 and 3
          const int byte = 4 * (j + i / 2) + i % 2 * 2 + d;
          a[i] = look_up<kRows, kOffset>(tables, column, word[byte / 4], byte % 4).word[0];
        }
        mma(sum[d], a, select.word[j], select.word[j + 1], __half{});
      }
    } else {  // one row of W, two words of its entry in a product
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int low = 8 * j + 2 * d, high = low + 1;
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

// Load i of an item: bytes into a row of the table.
template <int kRows>
__host__ __device__ constexpr int offset_of_load(int i) {
  return kRows == 1 ? i / 2 * 128 + i % 2 * 2 : 128 * i;
}

// Product n of a whole item with one row of x, of four in each load: its four entries.
template <int kLoad>
__device__ __forceinline__ void look_up_four(uint32_t (&a)[4], uint32_t tables, uint32_t column, const uint4& codes,
                                             int product) {
  const uint32_t word[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int byte = 4 * product + i % 2 * 2 + i / 2;
    a[i] = look_up<1, offset_of_load<1>(kLoad)>(tables, column, word[byte / 4], byte % 4).word[0];
  }
}

// Product n of an item with one row of x: its load is known where the loop over products is unrolled.
__device__ __forceinline__ void look_up_product(uint32_t (&a)[4], uint32_t tables, uint32_t column,
                                                const Codes<1>& codes, int n) {
  if (n / 4 == 0) look_up_four<0>(a, tables, column, codes.load[0], n % 4);
  if (n / 4 == 1) look_up_four<1>(a, tables, column, codes.load[1], n % 4);
  if (n / 4 == 2) look_up_four<2>(a, tables, column, codes.load[2], n % 4);
  if (n / 4 == 3) look_up_four<3>(a, tables, column, codes.load[3], n % 4);
}

// kGroups loads of an item with one row of x: look-ups are kAhead products ahead of the products, and between them the
// sums of the item before are taken together.
template <int kGroups>
__device__ __forceinline__ void add_groups(float (&sum)[4], uint32_t tables, uint32_t column, const Codes<1>& codes,
                                           const Selectors<1>& select, Folding& before) {
  constexpr int kAhead = 4, kTurns = 4 * kGroups + kAhead;
  uint32_t a[kAhead][4];
#pragma unroll
  for (int n = 0; n < kTurns; ++n) {
    if (n >= kAhead) {
      const int done = n - kAhead, j = 2 * (done % 4);
      mma(sum, a[done % kAhead], select.word[j], select.word[j + 1], __half{});
    }
    if (n + kAhead < kTurns) look_up_product(a[n % kAhead], tables, column, codes, n);
    if (n >= 1 && n <= 1 + Folding::kLast) before.go_on(n - 1);
  }
}

// All codes of an item with one row of x looked up and added.
__device__ __forceinline__ void add_loads(float (&sum)[4], uint32_t tables, uint32_t column, uint32_t groups,
                                          const Codes<1>& codes, const Selectors<1>& select, Folding& before) {
  if (groups == 4) return add_groups<4>(sum, tables, column, codes, select, before);
  if (groups == 3) return add_groups<3>(sum, tables, column, codes, select, before);
  if (groups == 2) return add_groups<2>(sum, tables, column, codes, select, before);
  add_groups<1>(sum, tables, column, codes, select, before);
}

// The same with more rows.
template <int kRows>
__device__ __forceinline__ void add_loads(float (&sum)[kRows][4], uint32_t tables, uint32_t column, uint32_t groups,
                                          const Codes<kRows>& codes, const Selectors<kRows>& select) {
  if constexpr (kRows == 2) {
    if (groups > 1) add_codes<2, offset_of_load<2>(1)>(sum, tables, column, codes.load[1], select);
  }
  add_codes<kRows, 0>(sum, tables, column, codes.load[0], select);
}

}  // namespace localq::vq
