// What a tile of 16 rows is looked up in: for every byte of codes the pair of f16 values that it stands for.
//
// Entry (code, half, lane) is the register of m16n8k16's operand A that lane 4 g + t needs where row g (half 0) or
// g + 8 (half 1) has that byte: its low nibble's value in the low half, for that is the even column. It lies at
// 256 code + 128 half + 4 lane, so lanes never meet in a bank, whatever their codes, and the four lanes of a row have
// a copy each. 64 KB, written in stores of 16 bytes, the four copies of a pair: by 512 threads eight each, by 256 twice
// as many.
#pragma once

#include "common/shared_memory.cuh"
#include "rows/gemv_kernel.cuh"

namespace localq::rowlut {

constexpr int kMostWarps = 16, kMostThreads = 32 * kMostWarps;  // of a block, or half as many
constexpr uint32_t kValueBytes = 32;                            // of a row's values
constexpr uint32_t kCodeBytes = 256;                            // of a code's entries
constexpr uint32_t kHalfBytes = 128;                            // of those of rows 0 to 7, or 8 to 15
constexpr uint32_t kPairTableBytes = 256 * kCodeBytes;

struct RowLutGemv {
  RowGemv row;                         // each, more: in units
  const __half* values[kMaxSegments];  // [out][16]
  uint32_t warps;                      // of a block: 16, or 8 where two blocks share a multiprocessor
  uint32_t steps;                      // of 64 bytes of a row of codes
  uint32_t step_bytes, row_stride;     // from a step of codes to the next, and from row to row among eight
  uint32_t tile_bytes;                 // from tile to tile, where both are whole
  uint32_t unit;                       // results that one block has all of
  uint32_t row_bits;                   // rows of x, rounded up to a power of two
  uint32_t ahead;                      // so many tiles ahead codes are asked for into L2; 0: not at all
  uint32_t zero;                       // is zero
  bool two;                            // tables: the next tile's is made while one is read
};

__device__ __forceinline__ Span span_of(const RowLutGemv& p) {
  const uint32_t units = blockIdx.x * p.row.each + min(blockIdx.x, p.row.more);
  Span span;
  span.begin = units * p.unit;
  span.end = (units + p.row.each + (blockIdx.x < p.row.more)) * p.unit;
  span.tiles = tiles_of(span.end - span.begin, p.row.span);
  return span;
}

// The lane's own value, so that ptxas keeps it in a register instead of making it again wherever it is needed.
__device__ __forceinline__ uint32_t kept(uint32_t value) {
  return __shfl_sync(~0u, value, int(threadIdx.x % 32));
}

// A thread's part of a table: row g or g + 8 of the tile, one value of high nibbles (in a block of 8 warps that 8
// behind it, too), eight of low ones.
struct Part {
  uint32_t g, half, low, high;

  __device__ __forceinline__ Part()
      : g(threadIdx.x % 8), half(threadIdx.x / 8 % 2), low(threadIdx.x / 16 % 2 * 8), high(threadIdx.x / 32) {
  }
};

struct Values {
  uint4 low;          // eight
  uint32_t high[2];   // one or two
  const uint8_t* at;  // where those of low nibbles are
  int to_high;        // bytes from there to that of high ones
};

// A row of one of the matrices.
struct Row {
  uint32_t segment, o;
};

// Row g, or g + 8 with `half`, of a tile. Rows past the end repeat the last one of the block, tiles past the end too.
__device__ __forceinline__ Row row_of(const RowLutGemv& p, const Span& span, uint32_t tile, uint32_t g, uint32_t half) {
  const bool paired = p.row.span != kRowTile;
  Row row = {paired ? half : 0, min(span.begin + tile * p.row.span + g + (paired ? 0 : 8 * half), span.end - 1)};
  while (!paired && row.o >= p.row.segment[row.segment].out) row.o -= p.row.segment[row.segment++].out;
  return row;
}

// From the values of the tile before to those of `tile`, which lies `behind` it (codes.cuh), or not.
__device__ __forceinline__ void load_values(const RowLutGemv& p, const Span& span, uint32_t tile, bool behind,
                                            Values& values) {
  if (behind) {
    values.at += p.row.span * kValueBytes;
  } else {
    const Part part;
    const Row row = row_of(p, span, made_here(tile), part.g, part.half);
    values.at = reinterpret_cast<const uint8_t*>(p.values[row.segment]) + uint64_t(row.o) * kValueBytes + 2 * part.low;
    values.to_high = int(made_here(2 * (part.high - part.low)));
  }
  const auto* const high = reinterpret_cast<const unsigned short*>(values.at + values.to_high);
  values.low = __ldg(reinterpret_cast<const uint4*>(values.at));
  values.high[0] = __ldg(high), values.high[1] = __ldg(high + (kMostWarps - p.warps));
}

// The pairs of one value of high nibbles.
__device__ __forceinline__ void fill_codes(uint8_t* to, const Values& values, uint32_t high) {
  const uint32_t words[4] = {values.low.x, values.low.y, values.low.z, values.low.w};
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const uint32_t pair = __byte_perm(words[k / 2], high, k % 2 == 0 ? 0x5410 : 0x5432);
    store_words(to + k * kCodeBytes, make_uint4(pair, pair, pair, pair));
  }
}

// All threads; the block synchronises before and after.
__device__ __forceinline__ void fill_table(const RowLutGemv& p, uint8_t* table, const Values& values) {
  const Part part;
  uint8_t* const to = table + (16 * part.high + part.low) * kCodeBytes + part.half * kHalfBytes + 16 * part.g;
  fill_codes(to, values, values.high[0]);
  if (p.warps != kMostWarps) fill_codes(to + 16 * kMostWarps / 2 * kCodeBytes, values, values.high[1]);
}

}  // namespace localq::rowlut
