// Which lane of aqlm_gemv.cu has what: rows and codes of a tile, codewords, and x in shared memory.
//
// Lane (g, t) has 8 codes of row g and 8 of row g + 8 of an item, and 16 bytes of each of their codewords. kLanes lanes
// share a codeword: 1 for groups of 8 columns, 2 for groups of 16, each its half.
#pragma once

#include "gather/codebook.cuh"

namespace localq {

constexpr int kSlots = 8;                                // codes of a lane in a row of an item
constexpr uint32_t kItemColumns = 256, kItemWords = 32;  // words: 8 columns, 16 bytes of x
constexpr uint32_t kItemXBytes = kItemWords * 16;

struct GatherGemv : RowGemv {  // segment.rows: codes; row_bytes: of codes
  const uint8_t* codebook[kMaxSegments];
  uint32_t mask;  // of the offset of an entry, in bytes
  uint32_t kept;  // bytes of a codebook in shared memory: of the block's own, or of both of a pair
  bool narrow;    // rows of codes are multiples of 4 bytes, not of 16
};

// Where a word of x lies in shared memory: of an item, slot by slot, the four lanes' words beside each other.
template <int kLanes>
struct BySlots {
  __device__ __forceinline__ uint32_t operator()(uint32_t word) const {
    const uint32_t item = word / kItemWords, in_item = word % kItemWords, lanes = in_item / (kSlots * kLanes);
    const uint32_t slot = in_item / kLanes % kSlots, t = lanes * kLanes + in_item % kLanes;
    return item * kItemWords + slot * 4 + t;
  }
};

// The lane's rows of a tile, g and g + 8: their numbers and segments; rows that are not there are of segment kNoRow.
constexpr uint32_t kNoRow = ~0u;
struct TileRows {
  uint32_t row[2], segment[2];
};

__device__ __forceinline__ TileRows tile_rows(const RowGemv& p, const Span& span, uint32_t tile) {
  TileRows rows;
  const bool paired = p.span != kRowTile;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    rows.row[i] = span.begin + tile * p.span + threadIdx.x % 32 / 4 + (paired ? 0 : 8 * i);
    if (tile >= span.tiles || rows.row[i] >= span.end) {
      rows.row[i] = 0, rows.segment[i] = kNoRow;
    } else {
      rows.segment[i] = paired ? i : segment_number(p, rows.row[i]);
    }
  }
  return rows;
}

// The lane's codes of an item, of rows g and g + 8.
struct Codes {
  uint4 row[2];
};

template <int kLanes>
__device__ __forceinline__ Codes load_codes(const GatherGemv& p, const TileRows& rows, uint32_t item) {
  const uint32_t skipped = item * (64 / kLanes) + threadIdx.x % 4 / kLanes * 16;
  Codes codes;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool there = rows.segment[i] != kNoRow;
    const uint8_t* const from =
        p.segment[there ? rows.segment[i] : 0].rows + uint64_t(rows.row[i]) * p.row_bytes + skipped;
    const int left = there ? int(p.row_bytes) - int(skipped) : 0;
    if (!p.narrow) {
      codes.row[i] = load_weights(from, left, 0);
    } else {
      codes.row[i] = {load_codes_4(from, left, 0), load_codes_4(from + 4, left, 4), load_codes_4(from + 8, left, 8),
                      load_codes_4(from + 12, left, 12)};
    }
  }
  return codes;
}

// The codebooks of the lane's two rows of a tile. `own`: the segment whose first entries the block keeps.
struct Books {
  Codebook row[2];
};

__device__ __forceinline__ Books tile_books(const GatherGemv& p, const TileRows& rows, uint32_t own, uint32_t kept_at) {
  const bool paired = p.span != kRowTile;
  Books books;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t segment = rows.segment[i] == kNoRow ? own : rows.segment[i];
    books.row[i] = {p.codebook[segment], kept_at + (paired ? segment * p.kept : 0),
                    paired || segment == own ? p.kept : 0};
  }
  return books;
}

// The lane's 16 bytes of the codeword of slot `j`.
template <int kLanes>
__device__ __forceinline__ uint4 codeword(const Codebook& book, const uint4& codes, int j, uint32_t mask) {
  constexpr int kShift = kLanes == 1 ? 4 : 5;  // codewords of 16 and 32 bytes
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
  const uint32_t word = words[j / 2], offset = (j % 2 == 0 ? word << kShift : word >> (16 - kShift)) & mask;
  return gather(book, offset + (kLanes == 1 ? 0 : threadIdx.x % 2 * 16));
}

// Where the lane reads its row of x, and groups from its first to the end of the row.
struct XLane {
  const uint8_t* x;
  int left;
  uint32_t step;  // bytes from slot to slot
};

template <typename T, int kLanes>
__device__ __forceinline__ XLane x_lane(const GatherGemv& p, const uint8_t* staged, const T* x) {
  const uint32_t lane = threadIdx.x % 32, t = lane % 4;
  const bool there = lane / 4 < uint32_t(p.rows);
  const uint32_t row = there ? lane / 4 : 0;
  if (p.x_stride != 0) return {staged + row * p.x_stride + t * 16, there ? int(p.items) * 32 : 0, 64};
  const auto* const from = reinterpret_cast<const uint8_t*>(x) + uint64_t(row) * p.in * sizeof(T);
  const int groups = p.in / (8 * kLanes), first = t / kLanes * kSlots;
  return {from + (first * kLanes + t % kLanes) * 16, there ? groups - first : 0, 16 * kLanes};
}

}  // namespace localq
