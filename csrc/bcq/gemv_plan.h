// bcq_gemv: how a launch is cut, and its kernels.
#pragma once

#include <algorithm>

#include "bcq/gemv.cuh"
#include "lookup/gemv_launch.h"

namespace localq::bcq {

constexpr const char* kOp = "bcq_gemv";

using vq::ceil_div, vq::Plan;

// Launches the kernel for up to kRows rows of x.
template <typename T, int kRows>
void start(const Arguments& p, const Plan& plan, const void* x, void* y, int device, cudaStream_t stream);

constexpr uint32_t kLeastChunk = 8;  // blocks of columns that are worth more rows of x in a launch than one
constexpr uint32_t kRoundUnits = 2;  // what it costs to end a tile, in units

// Fills in p.tiles, p.chunk and p.split, and says how many blocks of threads there are; none where nothing fits into
// `budget` bytes. Stripes: as many as `multiprocessors`, or more where sums need it. The chunk is as large as fits, and
// the split the one whose slowest warp has least to do.
template <int kRows>
Plan plan_of(Arguments& p, uint32_t multiprocessors, uint32_t budget) {
  for (uint32_t stripes = std::min(p.units, multiprocessors);; stripes = std::min(p.units, 2 * stripes)) {
    p.tiles = ceil_div(p.units, stripes) * p.parts;
    uint64_t least = ~uint64_t(0);
    Plan plan = {};
    for (uint32_t log = 0; 1u << log <= vq::kWarps; ++log) {
      const uint32_t split = 1u << log;
      const uint32_t fixed = shared_bytes<kRows>(p.tiles, 0, split);
      if (fixed + kRows * kXBytes > budget) continue;
      const uint32_t chunk = std::min(p.columns, (budget - fixed) / (kRows * kXBytes));
      const uint64_t rounds = ceil_div(p.tiles, vq::kWarps / split);
      const uint64_t units = ceil_div(chunk, split) * p.planes + kRoundUnits,
                     cost = rounds * units * ceil_div(p.columns, chunk);
      if (cost >= least) continue;
      least = cost, p.chunk = chunk, p.split = split, p.split_log = log;
      plan = {stripes, shared_bytes<kRows>(p.tiles, chunk, split)};
    }
    if (plan.blocks != 0 || stripes == p.units) return plan;
  }
}

}  // namespace localq::bcq
