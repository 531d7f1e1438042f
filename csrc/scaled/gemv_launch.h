// The launcher of scaled_gemv for each kind.
#pragma once

#include "scaled/gemv_kernel.cuh"

namespace localq::scaled {

// Warps and items of each in shared memory, from what hides latency best to what needs least.
constexpr uint32_t kRings[][2] = {{16, 4}, {16, 3}, {16, 2}, {12, 2}, {8, 2}, {4, 2}};

// Divides `units` among blocks with `fit` units at most; a whole number of waves, all as equal as can be.
inline uint32_t divide(Arguments& p, uint32_t units, uint32_t fit, uint32_t sms) {
  const uint32_t waves = (units + sms * fit - 1) / (sms * fit), grid = units < sms * waves ? units : sms * waves;
  p.units_each = units / grid, p.units_more = units % grid;
  p.most_tiles = (p.units_each + (p.units_more > 0 ? 1 : 0)) * p.parts;
  return grid;
}

// False if not even a ring of two items for four warps has room beside x, so that nothing was launched.
template <class Kind>
bool launch_gemv(Arguments p, uint32_t units, const void* x, void* y, int device, cudaStream_t stream) {
  constexpr uint32_t kItemBytes = Reader<Kind>::kItemBytes;
  constexpr const char* kOp = "scaled_gemv";
  const DeviceFacts& facts = device_facts(device, kOp);
  const uint32_t budget = facts.shared_bytes_per_block, sms = facts.multiprocessors;
  p.blocks = p.in / Kind::kColumns;
  p.chunks = (p.blocks + Kind::kItemBlocks - 1) / Kind::kItemBlocks;
  p.x_stride = 2 * p.in + (p.in % 64 == 0 ? 64 : 0);                                    // two rows use all banks
  const uint32_t each = (4 * kTileRows * p.rows + uint32_t(sizeof(Owners))) * p.parts;  // of a unit
  uint32_t best = 0;  // units of a block; enough for one wave, else as many as any ring leaves
  for (const auto& ring : kRings) {
    Arguments tried = p;
    tried.warps = ring[0], tried.stages = ring[1], tried.most_tiles = 0;
    const uint32_t others = layout_of(tried, kItemBytes).end + 16;  // owners are in fours
    if (others + each > budget) continue;
    const uint32_t fit = (budget - others) / each;
    if (fit <= best) continue;
    best = fit, p.warps = ring[0], p.stages = ring[1];
    if (uint64_t(fit) * sms >= units) break;
  }
  if (best == 0) return false;
  const uint32_t grid = divide(p, units, best, sms), needed = layout_of(p, kItemBytes).end;
  const uint32_t alone = budget / 2 + 1024;  // two blocks do not fit
  launch(kOp, device, scaled_gemv_kernel<Kind>, dim3(grid), dim3(32 * p.warps), needed > alone ? needed : alone, stream,
         p, x, y);
  return true;
}

}  // namespace localq::scaled
