// Device side of vptq_gemv.cu: a warp over its items, from indices to sums.
//
// A unit is one vector of one matrix, 8 or 16 results: codewords run along the output, so a lane that gathers one adds
// w[r] * x[column] to 8 sums for each row of x. With vectors of 16 two lanes share a column, and each takes its half of
// the codeword, so that one request asks for the whole sector. Lanes beside each other have columns (places) beside
// each other. An item is kSlots of them in every lane.
#pragma once

#include <cstring>
#include <type_traits>

#include "gather/codebook.cuh"
#include "gather/vptq_indices.cuh"

namespace localq {

struct VptqSegment {
  const uint8_t* indices;        // packed u32 [vectors, words], or u16 [vectors, in]
  const uint16_t* res_indices;   // u16 [vectors, in] where unpacked
  const uint8_t* centroids;      // T [count, vector]
  const uint8_t* res_centroids;  // T [residuals, vector] or null
  const uint16_t* places;        // [in] or null
  const void *scale, *bias;      // T [in] or null
  uint32_t vectors;
  bool lines;  // there are places; they, scale and bias begin at multiples of 16 bytes
};

struct VptqGemv : RowGemv {  // items: of a unit, in a window; segment: bias and out alone
  VptqSegment of[kMaxSegments];
  uint32_t words, main_bits, bits, count, residuals;  // words: 0 where unpacked
  uint32_t units;                                     // of all matrices; of one, where they are a pair
  uint32_t block_units;                               // of a block, at most
  uint32_t window;                                    // columns that are staged at a time
  uint32_t kept, res_kept;                            // bytes of both codebooks in shared memory
  int segments;
};

// Part of a block's work: consecutive units of one matrix, one window of columns.
struct Pass {
  uint32_t segment, first, units;  // first: vector of the matrix
  uint32_t begin;                  // column of the window
  Codebook book, res_book;
};

template <typename T, int kLanes, bool kResidual, int kRows>
struct VptqWarp {
  // In flight per thread. Sums of several rows take more of the registers; a table of residuals that is small costs no
  // sector, and shorter items of one that is large gain nothing (README.md).
  static constexpr int kGathers = kRows == 1 && kResidual ? 16 : 8;
  static constexpr int kTables = kResidual ? 2 : 1, kSlots = kGathers / kTables;
  static constexpr uint32_t kStep = 32 / kLanes, kItem = kSlots * kStep;  // columns of a slot, of an item
  static constexpr uint32_t kVector = 8 * kLanes, kValues = kVector * kRows;
  using Pair = typename std::conditional<std::is_same<T, __half>::value, __half2, __nv_bfloat162>::type;

  // Indices of an item as they were read: packed a word that the lanes of a slot share, unpacked main and residual.
  struct Raw {
    uint32_t word[kSlots], residual[kSlots];
  };
  struct Pipeline {
    Cursor now, next;  // tile: unit of the pass; the ring holds codewords of the item at `now`
    Raw raw;           // of the item at `next`
    uint4 ring[kSlots][kTables];
  };

  static __device__ __forceinline__ uint32_t lane_column() {
    return threadIdx.x % 32 / kLanes;
  }

  // Asks for the indices of an item, which begins at a whole word. A slot has at most a word for each lane: they are
  // asked for once, and `unpack` takes them from the lane that has them.
  static __device__ __forceinline__ void load_item(Raw& raw, const VptqGemv& p, const Pass& pass, const Cursor& at) {
    const VptqSegment& of = p.of[pass.segment];
    const bool there = at.tile < pass.units;
    const uint64_t vector = pass.first + (there ? at.tile : 0);
    const uint32_t column = pass.begin + at.item * kItem, lane = threadIdx.x % 32;
    if (p.words == 0) {
      const uint32_t own = column + lane_column();
      const int left = there ? int(p.in) - int(own) : 0;
      const uint64_t index = vector * p.in + own;
#pragma unroll
      for (int j = 0; j < kSlots; ++j) {
        const int needed = j * kStep;
        raw.word[j] = load_index_2(reinterpret_cast<const uint16_t*>(of.indices) + index + needed, left, needed);
        raw.residual[j] = kResidual ? load_index_2(of.res_indices + index + needed, left, needed) : 0;
      }
      return;
    }
    const uint32_t first = column * p.bits / 32 + lane;
    const int left = there && 32 * lane < kStep * p.bits + 16 * (kLanes - 1) ? int(p.words) - int(first) : 0;
    const uint8_t* const from = of.indices + (vector * p.words + first) * 4;
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      const uint32_t needed = j * kStep * p.bits / 32;
      raw.word[j] = load_codes_4(from + 4 * needed, left, needed);
      raw.residual[j] = 0;
    }
  }

  // Makes of packed words what was read of unpacked indices. All lanes must call.
  static __device__ __forceinline__ void unpack(const VptqGemv& p, Raw& raw) {
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      const uint32_t bit = j * kStep * p.bits % 32 + lane_column() * p.bits;
      const uint32_t low = __shfl_sync(~0u, raw.word[j], int(bit / 32));
      const uint32_t high = __shfl_sync(~0u, raw.word[j], int(bit / 32 + 1) % 32);
      const uint32_t both = __funnelshift_r(low, high, bit % 32) & (~0u >> (32 - p.bits));
      raw.word[j] = both & ((1u << p.main_bits) - 1);
      raw.residual[j] = kResidual ? both >> p.main_bits : 0;
    }
  }

  // The codewords of an item: the lane's 16 bytes of main and residual. Shuffles are done before the first of them is
  // asked for: between loads of which a lane does one or the other, ptxas would wait for both to join them.
  static __device__ __forceinline__ void gather_item(uint4 (&to)[kSlots][kTables], const VptqGemv& p, const Pass& pass,
                                                     Raw raw) {
    if (p.words != 0) unpack(p, raw);
    const uint32_t part = kLanes == 1 ? 0 : threadIdx.x % 2 * 16;
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      to[j][0] = gather(pass.book, min(raw.word[j], p.count - 1) * (2 * kVector) + part);
      if (!kResidual) continue;
      to[j][kTables - 1] = gather(pass.res_book, min(raw.residual[j], p.residuals - 1) * (2 * kVector) + part);
    }
  }

  // Adds the product of slot `j` to sum[row * 8 + r]. norm, x: those of the item, by column.
  static __device__ __forceinline__ void multiply(float (&sum)[8 * kRows], const uint4 (&ring)[kTables],
                                                  const Pair* norm, const T* x) {
    Pair w[4], more[4];
    memcpy(w, &ring[0], 16);
    memcpy(more, &ring[kTables - 1], 16);
    float values[kRows];
    read_x(values, x);
    const bool normed = norm != nullptr;
    const Pair both = normed ? *norm : Pair{};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (kResidual) w[i] = __hadd2_rn(w[i], more[i]);
      if (normed) w[i] = __hadd2_rn(__hmul2_rn(w[i], Pair{both.x, both.x}), Pair{both.y, both.y});
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        sum[8 * row + 2 * i] = fmaf(to_float(w[i].x), values[row], sum[8 * row + 2 * i]);
        sum[8 * row + 2 * i + 1] = fmaf(to_float(w[i].y), values[row], sum[8 * row + 2 * i + 1]);
      }
    }
  }

  static __device__ __forceinline__ void read_x(float (&values)[kRows], const T* x) {
    if constexpr (kRows == 1) {
      values[0] = to_float(*x);
    } else {
      const Eight<T> eight = *reinterpret_cast<const Eight<T>*>(x);
#pragma unroll
      for (int row = 0; row < kRows; ++row) values[row] = to_float(eight.value[row]);
    }
  }

  // Adds up what the lanes have of kCount sums, from lanes kMask apart down to neighbours with the same part of a
  // codeword: as long as there are several, a lane gives away half of them and adds to the other half.
  template <uint32_t kMask, uint32_t kCount>
  static __device__ __forceinline__ void add_lanes(float (&sum)[8 * kRows]) {
    if constexpr (kMask >= kLanes) {
      const bool upper = (threadIdx.x & kMask) != 0;
      constexpr uint32_t kKept = kCount > 1 ? kCount / 2 : 1;
#pragma unroll
      for (uint32_t i = 0; i < kKept; ++i) {
        const float other = sum[(i + kKept) % kCount];
        const float send = kCount > 1 && upper ? sum[i] : other, own = kCount > 1 && upper ? other : sum[i];
        sum[i] = own + __shfl_xor_sync(~0u, send, kMask);
      }
      add_lanes<kMask / 2, kKept>(sum);
    }
  }

  // Leaves the warp's sums as share[row * kVector + result].
  static __device__ __forceinline__ void leave(float* share, float (&sum)[8 * kRows]) {
    add_lanes<16, 8 * kRows>(sum);
    constexpr uint32_t kHolders = 8 * kRows < kStep ? 8 * kRows : kStep, kHeld = 8 * kRows / kHolders;
    if (lane_column() % (kStep / kHolders) != 0) return;  // the lane beside has the same
    const uint32_t first = lane_column() / (kStep / kHolders) * kHeld;
#pragma unroll
    for (uint32_t i = 0; i < kHeld; ++i) {
      const uint32_t value = first + i;
      share[value / 8 * kVector + threadIdx.x % kLanes * 8 + value % 8] = sum[i];
    }
  }

  // All of the warp's items of the units from `first` on, at most a group.
  static __device__ __forceinline__ void sum_units(const VptqGemv& p, const Pass& pass, float* shares, uint32_t first,
                                                   const Pair* norm, const T* x, Pipeline& pipeline) {
    const uint32_t end = min(first + p.group, pass.units);
    float sum[8 * kRows] = {};
#pragma unroll 1
    while (pipeline.now.tile < end) {
      const Cursor now = pipeline.now;
      const uint32_t column = now.item * kItem + lane_column();
      // ptxas waits for all loads at once: here for what the item before has asked for, and nowhere below
      uint4 words[kSlots][kTables];
#pragma unroll
      for (int i = 0; i < kGathers; ++i) words[i / kTables][i % kTables] = pipeline.ring[i / kTables][i % kTables];
      gather_item(pipeline.ring, p, pass, pipeline.raw);
      pipeline.now = pipeline.next;
      pipeline.next.advance(p.items);
      load_item(pipeline.raw, p, pass, pipeline.next);
#pragma unroll
      for (int j = 0; j < kSlots; ++j) {
        const uint32_t at = column + j * kStep;
        multiply(sum, words[j], norm == nullptr ? nullptr : norm + at, x + at * kRows);
      }
      if (pipeline.now.tile == now.tile) continue;
      leave(shares + ((now.tile - first) * kRowWarps + threadIdx.x / 32) * kValues, sum);
#pragma unroll
      for (int i = 0; i < 8 * kRows; ++i) sum[i] = 0.f;
    }
  }
};

}  // namespace localq
