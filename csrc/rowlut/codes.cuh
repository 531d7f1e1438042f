// Where a lane of `rowlut_gemv` finds its codes, and its loads of them.
//
// Codes lie row by row, or in tiles (rowlut.h): then what a warp loads of eight rows is 512 bytes behind each other.
// Two strides say which, and one constant leads from a tile to the next in either, as long as both are whole.
#pragma once

#include "rowlut/table.cuh"

namespace localq::rowlut {

// Steps of a batch, 64 bytes of every row of a tile each, 64 codes a lane. One batch is under way while another is
// multiplied: ptxas gives all loads of codes one scoreboard, so what waits for one batch waits for all that is under
// way, and none may have been asked for late.
constexpr uint32_t kSteps = 2;

// The steps of every tile that are the warp's.
struct Columns {
  uint32_t begin, end;
};

__device__ __forceinline__ Columns columns_of_warp(const RowLutGemv& p) {
  const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // so that ptxas knows that a warp agrees on them
  return {p.steps * warp / p.warps, p.steps * (warp + 1) / p.warps};
}

// The tiles before this one, from `tile` on, are whole and of the matrix that it begins in: from each to the next is
// `p.tile_bytes`.
__device__ __forceinline__ uint32_t whole_tiles(const RowLutGemv& p, const Span& span, uint32_t tile) {
  const Row first = row_of(p, span, tile, 0, 0);
  const uint32_t left = span.end - span.begin - tile * p.row.span;
  return tile + min(left, p.row.segment[first.segment].out - first.o) / p.row.span;
}

// The warp's codes: the batch that is multiplied and the one under way, and where those of the tile of the last load
// are. What a load leaves out stays as it was: x is zero there.
struct Codes {
  uint4 batch[2][kSteps][2] = {};
  uint32_t now = 0;           // 0 or 1
  const uint8_t *low, *high;  // of the first step of two rows
  int end;                    // the lane's steps
  uint32_t whole = 0;         // see `whole_tiles`
};

// The codes of a row.
__device__ __forceinline__ const uint8_t* codes_of(const RowLutGemv& p, const Row& row) {
  return p.row.segment[row.segment].rows + uint64_t(row.o & ~7u) * p.row.row_bytes + row.o % 8 * p.row_stride;
}

// From the tile before to `tile`, which lies `behind` it in the sense of `whole_tiles`, or not. Past the end there is
// nothing to load.
__device__ __forceinline__ void go_to_tile(const RowLutGemv& p, const Span& span, const Columns& columns, uint32_t tile,
                                           bool behind, Codes& codes) {
  if (behind) {
    codes.low += p.tile_bytes, codes.high += p.tile_bytes;
    return;
  }
  codes.end = 0;
  if (tile >= span.tiles) return;
  tile = made_here(tile);  // so that nothing of this is worked out for every tile
  const uint32_t lane = threadIdx.x % 32, skipped = lane % 4 * 16;
  codes.low = codes_of(p, row_of(p, span, tile, lane / 4, 0)) + skipped;
  codes.high = codes_of(p, row_of(p, span, tile, lane / 4, 1)) + skipped;
  codes.end = int(min(columns.end, (p.row.row_bytes - skipped + kStepBytes - 1) / kStepBytes));
  codes.whole = whole_tiles(p, span, tile);
}

// Asks for the tile's batch from `step` on, where `left` of the lane's steps are left.
__device__ __forceinline__ void load_batch(const RowLutGemv& p, const Codes& codes, uint4 (&to)[kSteps][2],
                                           uint32_t step, int left) {
#pragma unroll
  for (uint32_t s = 0; s < kSteps; ++s) {
    const uint64_t from = uint64_t(step + s) * p.step_bytes;
    load_codes(to[s][0], to[s][1], codes.low + from, codes.high + from, left, int(s));
  }
}

// Into L2, the values of one tile and the codes of another: two lanes' business, of another warp for each tile. Eight
// rows lie behind each other; where a matrix ends among them, those of the next one are not asked for.
__device__ __forceinline__ void prefetch_tiles(const RowLutGemv& p, const Span& span, uint32_t values, uint32_t codes) {
  if (threadIdx.x / 32 != (values & (p.warps - 1)) || threadIdx.x % 32 > 1) return;
  if (values < span.tiles) {
    const Row row = row_of(p, span, values, 0, threadIdx.x % 32);
    const uint32_t rows = min(8u, p.row.segment[row.segment].out - row.o);
    prefetch_bytes(p.values[row.segment] + uint64_t(row.o) * 16, rows * kValueBytes);
  }
  if (p.ahead > 0 && codes < span.tiles) {
    Row row = row_of(p, span, codes, 0, threadIdx.x % 32);
    if (p.row_stride != p.row.row_bytes) row.o &= ~7u;  // tiles: also of a block that begins within one
    const uint32_t rows = min(8u, p.row.segment[row.segment].out - row.o), of_row = p.row.row_bytes;
    prefetch_bytes(p.row.segment[row.segment].rows + uint64_t(row.o) * of_row, rows * of_row);
  }
}

}  // namespace localq::rowlut
