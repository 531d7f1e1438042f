// Stages of gemm.cu: how a launch is cut, and what brings codes, scales and x of a stage to shared memory.
#pragma once

#include "nf4/gemv.cuh"

namespace localq::gemm {

constexpr int kRowsAtOnce = 64;
constexpr int kTilesOfWarp = 2;
// 16-byte words of 8 rows of x and 64 columns: two halves as the lanes read them, apart so that writes fill all banks.
constexpr int kXWords = 68, kXSecondHalf = 36;
constexpr int kWarpStageBytes = kTilesOfWarp * (kTileWords * 16 + 8 * 4);  // codes, absmax words

// How the launch is cut. `parts`: blocks of 64 columns of a stage, and warps that share their tiles; divides kChunk.
struct Cut {
  uint32_t pairs, parts, depth, stage_bytes, tiles_bytes, most_tiles;
};

// The warp's work: two tiles, one of them twice where the block has an odd number; `part` is its block of a stage. In
// two words, because it stays in registers throughout.
struct Work {
  uint32_t unit;    // first tile of the block
  uint32_t packed;  // tiles of the block, the warp's tiles counted from `unit`, part: 8 bits each

  __device__ __forceinline__ uint32_t tiles() const {
    return packed & 255;
  }
  __device__ __forceinline__ uint32_t local(int j) const {
    return packed >> (8 * j + 8) & 255;
  }
  __device__ __forceinline__ uint32_t tile(int j) const {
    return unit + local(j);
  }
  __device__ __forceinline__ uint32_t part() const {
    return packed >> 24;
  }
};

__device__ __forceinline__ Work work_of(const Nf4Gemv& p, const Cut& cut) {
  const uint32_t unit = uint64_t(p.units) * blockIdx.x / gridDim.x, warp = threadIdx.x / 32;
  const uint32_t tiles = uint32_t(uint64_t(p.units) * (blockIdx.x + 1) / gridDim.x) - unit;
  const uint32_t first = min(warp % cut.pairs * kTilesOfWarp, tiles - 1), second = min(first + 1, tiles - 1);
  return {unit, tiles | first << 8 | second << 16 | warp / cut.pairs << 24};
}

// Both tiles are whole, and so is the chunk that `block` lies in.
__device__ __forceinline__ bool is_quick(const Nf4Gemv& p, const Work& work, uint32_t block) {
  const Nf4Segment& w = p.segment[0];
  return w.tiled && p.nested_map != nullptr && is_full(w, work.tile(1)) && block / kChunk * kChunk + kChunk <= p.blocks;
}

struct Shared {
  uint8_t *table, *stages;
  TileTable tiles;
};

template <int kBytes>
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  const uint32_t shared = __cvta_generic_to_shared(to);
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(from), "n"(kBytes) : "memory");
  }
}

__device__ __forceinline__ void commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most depth - 2 groups are in flight: the oldest stage is there.
__device__ __forceinline__ void wait_for_oldest(uint32_t depth) {
  if (depth == 2) asm volatile("cp.async.wait_group 0;" ::: "memory");
  if (depth == 3) asm volatile("cp.async.wait_group 1;" ::: "memory");
  if (depth == 4) asm volatile("cp.async.wait_group 2;" ::: "memory");
}

// Where a warp keeps its codes of a stage; the words of absmax lie behind both tiles' codes.
template <int kRowTiles>
__device__ __forceinline__ uint8_t* warp_stage(const Shared& s, const Cut& cut, const Work& work, uint32_t slot) {
  return s.stages + slot * cut.stage_bytes + cut.parts * kRowTiles * kXWords * 16 + threadIdx.x / 32 * kWarpStageBytes;
}

// Brings the warp's codes of a stage, and the words of absmax that hold its block: four of rows g and g + 8 of a tile.
template <int kRowTiles>
__device__ __forceinline__ void bring_weights(const Nf4Gemv& p, const Shared& s, const Cut& cut, const Work& work,
                                              uint32_t stage, uint32_t slot) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, block = stage * cut.parts + work.part();
  if (block >= p.blocks) return;
  const Nf4Segment& w = p.segment[0];
  uint8_t* const to = warp_stage<kRowTiles>(s, cut, work, slot);
#pragma unroll
  for (int j = 0; j < kTilesOfWarp; ++j) {
    const uint32_t tile = work.tile(j);
    uint8_t* const word = to + (j * kTileWords + lane) * 16;
    if (w.tiled && is_full(w, tile)) {
      copy_async<16>(word, w.codes + ((uint64_t(tile) * p.blocks + block) * kTileWords + lane) * 16);
    } else {
      const uint32_t low = min(tile * kTile + g, w.out - 1), high = min(tile * kTile + g + 8, w.out - 1);
      copy_async<8>(word, w.codes + (uint64_t(low) * p.blocks + block) * (kBlock / 2) + 8 * t);
      copy_async<8>(word + 8, w.codes + (uint64_t(high) * p.blocks + block) * (kBlock / 2) + 8 * t);
    }
  }
  const uint32_t j = lane / 8, first = block / kChunk * kChunk;
  if (j < kTilesOfWarp && is_quick(p, work, block)) {
    const uint32_t tile = j == 0 ? work.tile(0) : work.tile(1);
    const auto* from = static_cast<const uint8_t*>(w.absmax) + uint64_t(tile * p.blocks + first) * kTile;
    copy_async<4>(to + kTilesOfWarp * kTileWords * 16 + lane * 4, from + (4 * (lane % 8) + block % kChunk / 2) * 4);
  }
}

// Brings x of a stage with all threads; rows that are not there repeat the last one, for results that nobody looks at.
template <typename T, int kRowTiles>
__device__ __forceinline__ void bring_x(const Nf4Gemv& p, const Shared& s, const Cut& cut, const T* x,
                                        uint32_t all_rows, uint32_t stage, uint32_t slot) {
  const uint32_t row_begin = blockIdx.y * kRowsAtOnce, last = min(all_rows - row_begin, kRowsAtOnce) - 1;
  auto* const to = reinterpret_cast<uint4*>(s.stages + slot * cut.stage_bytes);
  const auto* from = reinterpret_cast<const uint4*>(x) + uint64_t(row_begin) * p.blocks * 8;
  const uint32_t first = stage * cut.parts, count = min(cut.parts, p.blocks - first);
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < count * kRowTiles * 64; i += blockDim.x) {
    const uint32_t word = i % 8, row = i / 8 % (8 * kRowTiles), block = i / (64 * kRowTiles);
    const uint32_t at = (block * kRowTiles + row / 8) * kXWords + word % 2 * kXSecondHalf + row % 8 * 4 + word / 2;
    copy_async<16>(to + at, from + (uint64_t(min(row, last)) * p.blocks + first + block) * 8 + word);
  }
}

}  // namespace localq::gemm
