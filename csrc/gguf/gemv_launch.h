// The launcher of gguf_gemv for each block type: gemv_32.cu and gemv_256.cu have the instances.
#pragma once

#include "gguf/gemv_kernel.cuh"

namespace localq::gguf {

// False if not even a ring of two items for four warps has room beside x, so that nothing was launched.
template <class Block>
bool launch_gemv(Arguments p, uint32_t units, const void* x, void* y, int device, cudaStream_t stream);

// Warps and items of each in shared memory, from what hides latency best to what needs least.
constexpr uint32_t kRings[][2] = {{16, 4}, {16, 3}, {16, 2}, {12, 2}, {8, 2}, {4, 2}};

// Divides `units` among blocks with `fit` units at most; a whole number of waves, all as equal as can be.
template <class P>
uint32_t divide(P& p, uint32_t units, uint32_t fit, uint32_t sms) {
  const uint32_t waves = (units + sms * fit - 1) / (sms * fit), grid = units < sms * waves ? units : sms * waves;
  p.units_each = units / grid, p.units_more = units % grid;
  p.most_tiles = (p.units_each + (p.units_more > 0 ? 1 : 0)) * p.parts;
  return grid;
}

// Everything that depends on the block type and on the memory of the card, for `units` units: warps and ring, and how
// far apart things lie. Returns the units of a block, enough for one wave, else as many as any ring leaves; 0: not even
// a ring of two items for four warps has room beside x.
template <class Block, class P>
uint32_t fit_ring(P& p, uint32_t units, uint32_t budget, uint32_t sms) {
  constexpr uint32_t kItemBytes = Reader<Block, P>::kItemBytes;
  p.blocks = p.in / Block::kColumns;
  p.chunks = (p.blocks + Block::kItemBlocks - 1) / Block::kItemBlocks;
  // Two rows use all banks. Lanes of a type of 64 columns have 16 that follow each other, so that every second 16 bytes
  // are read together.
  p.x_stride = 2 * p.in + (Block::kColumns == 64 ? 16 : p.in % 64 == 0 ? 64 : 0);
  if (Block::kRun != 0) {
    p.sum_low = (p.in / (Block::kRun + (Block::kRun == 0)) + 15) / 16 * 32;
    p.sum_stride = 2 * p.sum_low;
  }
  const uint32_t each = (4 * kTileRows * p.rows + uint32_t(sizeof(Owners))) * p.parts;  // of a unit
  uint32_t best = 0;
  for (const auto& ring : kRings) {
    P tried = p;
    tried.warps = ring[0], tried.stages = ring[1], tried.most_tiles = 0;
    const uint32_t others = layout_of(tried, kItemBytes, Block::kTableBytes).end + 16;  // owners are in fours
    if (others + each > budget) continue;
    const uint32_t fit = (budget - others) / each;
    if (fit <= best) continue;
    best = fit, p.warps = ring[0], p.stages = ring[1];
    if (uint64_t(fit) * sms >= units) break;
  }
  return best;
}

// Divides the units, and launches `kernel` with one block per multiprocessor at a time.
template <class Block, class P>
void launch_tiles(const char* op, void (*kernel)(P, const void*, void*), P p, uint32_t units, uint32_t fit,
                  const DeviceFacts& facts, const void* x, void* y, int device, cudaStream_t stream) {
  const uint32_t grid = divide(p, units, fit, facts.multiprocessors);
  const uint32_t needed = layout_of(p, Reader<Block, P>::kItemBytes, Block::kTableBytes).end;
  const uint32_t alone = facts.shared_bytes_per_block / 2 + 1024;  // two blocks do not fit
  launch(op, device, kernel, dim3(grid), dim3(32 * p.warps), needed > alone ? needed : alone, stream, p, x, y);
}

template <class Block>
bool launch_gemv(Arguments p, uint32_t units, const void* x, void* y, int device, cudaStream_t stream) {
  constexpr const char* kOp = "gguf_gemv";
  const DeviceFacts& facts = device_facts(device, kOp);
  const uint32_t fit = fit_ring<Block>(p, units, facts.shared_bytes_per_block, facts.multiprocessors);
  if (fit == 0) return false;
  launch_tiles<Block>(kOp, gguf_gemv_kernel<Block>, p, units, fit, facts, x, y, device, stream);
  return true;
}

}  // namespace localq::gguf
