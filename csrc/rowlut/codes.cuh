// The addresses and loads of a lane's codes in rowlut_gemv.
//
// Codes are row-major or tiled (rowlut.h). In tiles, a warp's load of eight rows is 512 contiguous bytes. Two strides
// distinguish the orders, and one constant is the distance between consecutive whole tiles in either.
#pragma once

#include "rowlut/table.cuh"

namespace localq::rowlut {

// Steps per batch; a step is 64 bytes of each row of a tile, 64 codes per lane. One batch is in flight while another is
// multiplied. ptxas gives all loads of codes one scoreboard, so waiting for one batch waits for all loads in flight,
// and no load may be issued late.
constexpr uint32_t kSteps = 2;

// The warp's steps of every tile.
struct Columns {
  uint32_t begin, end;
};

__device__ __forceinline__ Columns columns_of_warp(const RowLutGemv& p) {
  const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // tells ptxas that the value is uniform in the warp
  return {p.steps * warp / p.warps, p.steps * (warp + 1) / p.warps};
}

// Returns a tile number: the tiles from `tile` up to it are whole and of the matrix in which `tile` begins, so they are
// `p.tile_bytes` apart.
__device__ __forceinline__ uint32_t whole_tiles(const RowLutGemv& p, const Span& span, uint32_t tile) {
  const Row first = row_of(p, span, tile, 0, 0);
  const uint32_t left = span.end - span.begin - tile * p.row.span;
  return tile + min(left, p.row.segment[first.segment].out - first.o) / p.row.span;
}

// The warp's codes: the current batch, the one in flight, and the addresses of the tile that was loaded last. A skipped
// load leaves its register unchanged, where x is zero.
struct Codes {
  uint4 batch[2][kSteps][2] = {};
  uint32_t now = 0;           // 0 or 1
  const uint8_t *low, *high;  // first step of two rows
  int end;                    // steps of the lane
  uint32_t whole = 0;         // see `whole_tiles`
};

// The codes of a row.
__device__ __forceinline__ const uint8_t* codes_of(const RowLutGemv& p, const Row& row) {
  return p.row.segment[row.segment].rows + uint64_t(row.o & ~7u) * p.row.row_bytes + row.o % 8 * p.row_stride;
}

// From the previous tile to `tile`; `behind` if it follows in the sense of `whole_tiles`. Past the end nothing is
// loaded.
__device__ __forceinline__ void go_to_tile(const RowLutGemv& p, const Span& span, const Columns& columns, uint32_t tile,
                                           bool behind, Codes& codes) {
  if (behind) {
    codes.low += p.tile_bytes, codes.high += p.tile_bytes;
    return;
  }
  codes.end = 0;
  if (tile >= span.tiles) return;
  tile = made_here(tile);  // keeps ptxas from computing the following for every tile
  const uint32_t lane = threadIdx.x % 32, skipped = lane % 4 * 16;
  codes.low = codes_of(p, row_of(p, span, tile, lane / 4, 0)) + skipped;
  codes.high = codes_of(p, row_of(p, span, tile, lane / 4, 1)) + skipped;
  codes.end = int(min(columns.end, (p.row.row_bytes - skipped + kStepBytes - 1) / kStepBytes));
  codes.whole = whole_tiles(p, span, tile);
}

// Loads the tile's batch from `step`; the lane has `left` steps left.
__device__ __forceinline__ void load_batch(const RowLutGemv& p, const Codes& codes, uint4 (&to)[kSteps][2],
                                           uint32_t step, int left) {
#pragma unroll
  for (uint32_t s = 0; s < kSteps; ++s) {
    const uint64_t from = uint64_t(step + s) * p.step_bytes;
    load_codes(to[s][0], to[s][1], codes.low + from, codes.high + from, left, int(s));
  }
}

// Prefetches the values of one tile and the codes of another to L2, with two lanes, of a different warp for each tile.
// Eight rows are contiguous; if a matrix ends among them, those of the next are not prefetched.
__device__ __forceinline__ void prefetch_tiles(const RowLutGemv& p, const Span& span, uint32_t values, uint32_t codes) {
  if (threadIdx.x / 32 != (values & (p.warps - 1)) || threadIdx.x % 32 > 1) return;
  if (values < span.tiles) {
    const Row row = row_of(p, span, values, 0, threadIdx.x % 32);
    const uint32_t rows = min(8u, p.row.segment[row.segment].out - row.o);
    prefetch_bytes(p.values[row.segment] + uint64_t(row.o) * 16, rows * kValueBytes);
  }
  if (p.ahead > 0 && codes < span.tiles) {
    Row row = row_of(p, span, codes, 0, threadIdx.x % 32);
    if (p.row_stride != p.row.row_bytes) row.o &= ~7u;  // tiles: also for a block that begins within one
    const uint32_t rows = min(8u, p.row.segment[row.segment].out - row.o), of_row = p.row.row_bytes;
    prefetch_bytes(p.row.segment[row.segment].rows + uint64_t(row.o) * of_row, rows * of_row);
  }
}

}  // namespace localq::rowlut
