// A launch of gemm_kernel.cuh.
#pragma once

#include <cstdint>

#include "experts/grouped.h"

namespace localq::grouped {

constexpr uint32_t kStageColumns = 64, kRowsOfWarp = 32, kTokens = kTileEntries, kTokenTiles = kTokens / 8;
constexpr uint32_t kMostStages = 4;

struct Arguments {
  const uint8_t *x, *codes, *scales;
  const float *nested_absmax, *nested_map, *code_map;
  float offset;
  const void* bias;
  const int32_t *rows, *ends, *tile_ends;
  uint32_t first, experts, all_experts;  // experts of the stack, and of the layer
  uint32_t in, row_bytes, out, width;    // width: results of an entry
  uint32_t row_blocks, stages, depth;    // blocks along the rows; stages in all, and in shared memory
  bool gated, interleaved, clamped;
  float alpha, limit;
};

}  // namespace localq::grouped
