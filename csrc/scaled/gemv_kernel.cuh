// The kernel of scaled_gemv; see gemv.cu.
#pragma once

#include "common/launch.h"
#include "common/tile_shares.cuh"
#include "scaled/intrinsics.cuh"
#include "scaled/kinds.cuh"

namespace localq::scaled {

using gguf::kMostRows;

constexpr int kMostWarps = 16;

// One matrix of a launch.
struct Segment {
  const uint8_t *codes, *scales, *zeros;
  const float* factors;
  const void* bias;
  uint32_t out, tiles;
  uint32_t y_begin;      // first column of its results
  uint32_t factor_step;  // 1 if there is a factor for each row, else 0
  bool divides;
};

// A launch (tile_shares.cuh). An item is up to kItemBlocks tile blocks that follow each other in a tile.
struct Arguments {
  Segment segment[kMaxSegments];
  GemvExtras extras;
  uint32_t units_each, units_more, parts;
  uint32_t in, blocks, chunks;  // blocks of a row, items of a tile
  uint32_t warps, stages;       // stages: items of a warp in shared memory
  uint32_t x_stride;            // bytes between rows of x
  uint32_t y_width, most_tiles;
  int rows;
  uint32_t row_bits;
  bool bf16;  // x, biases, residual and, unless f32, y
};

// Where what a block holds begins in shared memory, in bytes, in this order: a ring of items for each warp; x; partial
// sums; owners of tiles; a float per warp; largest values; factors of rows of x.
struct Layout {
  uint32_t x, shares, owners, scratch, largest, factors, end;
};

__host__ __device__ __forceinline__ Layout layout_of(const Arguments& p, uint32_t item_bytes) {
  Layout at = {};
  at.x = p.warps * p.stages * item_bytes;
  at.shares = at.x + p.rows * p.x_stride;
  at.owners = at.shares + 4 * share_floats(p);
  at.scratch = at.owners + (p.most_tiles + 3) / 4 * 4 * uint32_t(sizeof(Owners));
  at.largest = at.scratch + 4 * p.warps;
  at.factors = at.largest + 4 * p.warps * kMostRows;
  at.end = at.factors + 4 * kMostRows;
  return at;
}

// Copies `count` tile blocks of kBytes each, of which there are at most kMost. By all lanes of a warp.
template <uint32_t kBytes, uint32_t kMost>
__device__ __forceinline__ void copy_blocks(uint8_t* to, const uint8_t* from, uint32_t count) {
  constexpr uint32_t kAtOnce = kBytes % 16 == 0 ? 16 : 4;
#pragma unroll
  for (uint32_t i = 0; i < kBytes * kMost; i += 32 * kAtOnce) {
    const uint32_t at = i + threadIdx.x % 32 * kAtOnce;
    if (at >= count * kBytes) continue;
    if constexpr (kAtOnce == 16) {
      copy_async(to + at, from + at);
    } else {
      copy_async_4(to + at, from + at);
    }
  }
}

// A warp's place in its run of items: what is copied next.
template <class Kind>
struct Reader {
  static constexpr uint32_t kItemBlocks = Kind::kItemBlocks, kScalesAt = kItemBlocks * Kind::kBytes;
  static constexpr uint32_t kZerosAt = kScalesAt + kItemBlocks * Kind::kScaleBytes;
  static constexpr uint32_t kItemBytes = (kZerosAt + kItemBlocks * Kind::kZeroBytes + 15) / 16 * 16;

  const uint8_t *codes, *scales, *zeros;  // of the item
  uint32_t left, tile, chunk;             // items of the run that are left

  __device__ __forceinline__ Reader(const Arguments& p, const Work& work, uint32_t warp) {
    const uint32_t at = begin_of(p, work, warp);
    left = begin_of(p, work, warp + 1) - at, tile = at / p.chunks, chunk = at % p.chunks;
    codes = scales = zeros = nullptr;
    if (left != 0) find(p, work);
  }

  __device__ __forceinline__ void find(const Arguments& p, const Work& work) {
    uint32_t number = tile;
    const Segment& w = place_of(p, work.unit, number);
    const uint64_t block = uint64_t(number) * p.blocks + chunk * kItemBlocks;
    codes = w.codes + block * Kind::kBytes;
    scales = w.scales + block * Kind::kScaleBytes;
    zeros = w.zeros + block * Kind::kZeroBytes;
  }

  // Copies the next item, if there is one, and goes on. A group of copies ends in any case.
  __device__ __forceinline__ void copy_next(uint8_t* to, const Arguments& p, const Work& work) {
    if (left != 0) {
      const uint32_t count = min(p.blocks - chunk * kItemBlocks, kItemBlocks);
      copy_blocks<Kind::kBytes, kItemBlocks>(to, codes, count);
      if constexpr (Kind::kScaleBytes != 0) {
        copy_blocks<Kind::kScaleBytes, kItemBlocks>(to + kScalesAt, scales, count);
      }
      if constexpr (Kind::kZeroBytes != 0) {
        copy_blocks<Kind::kZeroBytes, kItemBlocks>(to + kZerosAt, zeros, count);
      }
      codes += count * Kind::kBytes, scales += count * Kind::kScaleBytes, zeros += count * Kind::kZeroBytes;
      ++chunk, --left;
      if (chunk == p.chunks) {
        chunk = 0, ++tile;
        if (left != 0) find(p, work);
      }
    }
    end_copies();
  }
};

// Waits for the oldest of `stages` groups of copies, by all lanes.
__device__ __forceinline__ void wait_for_oldest(uint32_t stages) {
  if (stages == 2) {
    wait_for_copies<1>();
  } else if (stages == 3) {
    wait_for_copies<2>();
  } else {
    wait_for_copies<3>();
  }
  __syncwarp();
}

// What sums of a tile's rows g and g + 8 are multiplied by.
template <class Kind>
__device__ __forceinline__ float2 factors_of(const Arguments& p, const Work& work, uint32_t tile) {
  uint32_t number = tile;
  const Segment& w = place_of(p, work.unit, number);
  if (w.factors == nullptr) return {Kind::kUnit, Kind::kUnit};
  const uint32_t row = number * kTileRows + threadIdx.x % 32 / 4;
  const float low = w.factors[row * w.factor_step], high = w.factors[(row + 8) * w.factor_step];
  if (w.divides) return {Kind::kUnit / low, Kind::kUnit / high};
  return {Kind::kUnit * low, Kind::kUnit * high};
}

// The warp's run of items. A warp without items leaves zeros, because it can be between two warps of a tile.
template <class Kind>
__device__ __forceinline__ void sum_run(const Arguments& p, const Shares& shares, const Work& work, const X& x,
                                        const float* x_factors, uint8_t* ring, Reader<Kind>& reader) {
  const uint32_t warp = threadIdx.x / 32, t = threadIdx.x % 4, at = begin_of(p, work, warp);
  uint32_t left = begin_of(p, work, warp + 1) - at, tile = at / p.chunks, chunk = at % p.chunks, stage = 0;
  const float2 of_x = {x_factors[2 * t], x_factors[2 * t + 1]};
  constexpr uint32_t kItemColumns = Kind::kItemBlocks * Kind::kColumns;
  float sum[4] = {};
  if (left == 0) leave_share(shares, sum, tile, p.rows);
#pragma unroll 1
  while (left != 0) {
    uint8_t* const item = ring + stage * Reader<Kind>::kItemBytes;
    const X here = {x.values + chunk * (2 * kItemColumns), nullptr, 0, x.is_row};
    wait_for_oldest(p.stages);
    Kind::product(sum, item, here, int(p.blocks - chunk * Kind::kItemBlocks));
    __syncwarp();  // all lanes have read the item
    reader.copy_next(item, p, work);
    stage = stage + 1 == p.stages ? 0 : stage + 1;
    const bool ends = chunk + 1 == p.chunks;
    if (chunk == 0) shares.owners[tile].first = uint16_t(warp);
    if (ends) shares.owners[tile].last = uint16_t(warp);
    if (--left == 0 || ends) {
      const float2 factor = factors_of<Kind>(p, work, tile);
      sum[0] *= of_x.x * factor.x, sum[1] *= of_x.y * factor.x;
      sum[2] *= of_x.x * factor.y, sum[3] *= of_x.y * factor.y;
      leave_share(shares, sum, tile, p.rows);
    }
    chunk = ends ? 0 : chunk + 1, tile += ends;
  }
}

template <class Kind, typename T>
__device__ __forceinline__ void stage(const Arguments& p, const Layout& at, const void* x) {
  uint8_t* const shared = shared_memory();
  gguf::stage_scaled(shared + at.x, p.x_stride, static_cast<const T*>(x), int(p.in), p.rows, Order<Kind::kGrouped>{},
                     p.extras, reinterpret_cast<float*>(shared + at.scratch),
                     reinterpret_cast<uint32_t*>(shared + at.largest), reinterpret_cast<float*>(shared + at.factors));
}

template <class Kind>
__global__ void __launch_bounds__(32 * kMostWarps, 1)
    scaled_gemv_kernel(const __grid_constant__ Arguments p, const void* x, void* y) {
  uint8_t* const shared = shared_memory();
  const Layout at = layout_of(p, Reader<Kind>::kItemBytes);
  const Shares shares = {reinterpret_cast<float*>(shared + at.shares), reinterpret_cast<Owners*>(shared + at.owners)};
  const uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
  uint8_t* const ring = shared + warp * p.stages * Reader<Kind>::kItemBytes;
  const Work work = work_of(p);
  Reader<Kind> reader(p, work, warp);
#pragma unroll 1
  for (uint32_t i = 0; i < p.stages; ++i) reader.copy_next(ring + i * Reader<Kind>::kItemBytes, p, work);
  dependency_wait();
  release_dependents();
  if (p.bf16) {
    stage<Kind, __nv_bfloat16>(p, at, x);
  } else {
    stage<Kind, __half>(p, at, x);
  }
  const bool is_row = int(g) < p.rows;
  const X of_lane = {shared + at.x + (is_row ? g : 0) * p.x_stride, nullptr, 0, is_row};
  sum_run<Kind>(p, shares, work, of_lane, reinterpret_cast<const float*>(shared + at.factors), ring, reader);
  __syncthreads();
  if (p.bf16) {
    write_tiles<__nv_bfloat16>(p, shares, work, y);
  } else {
    write_tiles<__half>(p, shares, work, y);
  }
}

}  // namespace localq::scaled
