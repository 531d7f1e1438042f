// The kernel of gguf_gemv; see gemv.cu.
#pragma once

#include "common/async_copies.cuh"
#include "common/launch.h"
#include "common/tile_shares.cuh"
#include "gguf/x.cuh"

namespace localq::gguf {

constexpr int kMostWarps = 16;

// One matrix of a launch.
struct Segment {
  const uint8_t* blocks;
  const void* bias;
  uint32_t out, tiles;
  uint32_t y_begin;  // first column of its results
  float factor;      // of block types that have one
};

// A launch (tile_shares.cuh). An item is up to kItemBlocks tile blocks that follow each other in a tile.
struct Arguments {
  static constexpr int kMostInputs = kMostRows;

  Segment segment[kMaxSegments];
  GemvExtras extras;
  const uint16_t* places;
  uint32_t units_each, units_more, parts;
  uint32_t in, blocks, chunks;             // blocks of a row, items of a tile
  uint32_t warps, stages;                  // stages: items of a warp in shared memory
  uint32_t x_stride, sum_stride, sum_low;  // bytes between rows of x, of its sums, and from high to low parts
  uint32_t y_width, most_tiles;
  int rows;
  uint32_t row_bits;
  bool bf16;  // x, biases, residual and, unless f32, y

  // Rows of x in shared memory.
  __host__ __device__ __forceinline__ uint32_t inputs() const {
    return uint32_t(rows);
  }
};

// The matrix of tile `tile` of the block, and the tile's number there.
__device__ __forceinline__ const uint8_t* matrix_of(const Arguments& p, const Work& work, uint32_t& tile) {
  return place_of(p, work.unit, tile).blocks;
}

// Where what a block holds begins in shared memory, in bytes, in this order: the block type's table; a ring of items
// for each warp; x; sums of x; partial sums; owners of tiles; a float per warp; largest values; factors of rows.
struct Layout {
  uint32_t ring, x, sums, shares, owners, scratch, largest, factors, end;
};

template <class P>
__host__ __device__ __forceinline__ Layout layout_of(const P& p, uint32_t item_bytes, uint32_t table_bytes) {
  Layout at = {};
  at.ring = table_bytes;
  at.x = at.ring + p.warps * p.stages * item_bytes;
  at.sums = at.x + p.inputs() * p.x_stride;
  at.shares = at.sums + p.inputs() * p.sum_stride;
  at.owners = at.shares + 4 * share_floats(p);
  at.scratch = at.owners + (p.most_tiles + 3) / 4 * 4 * uint32_t(sizeof(Owners));
  at.largest = at.scratch + 4 * p.warps;
  at.factors = at.largest + 4 * p.warps * kMostRows;
  at.end = at.factors + 4 * P::kMostInputs;
  return at;
}

// A warp's place in its run of items: what is copied next.
template <class Block, class P>
struct Reader {
  static constexpr uint32_t kItemBytes = Block::kItemBlocks * Block::kBytes;

  const uint8_t* from;
  uint32_t left, tile, chunk;  // items of the run that are left

  __device__ __forceinline__ Reader(const P& p, const Work& work, uint32_t warp) {
    const uint32_t at = begin_of(p, work, warp);
    left = begin_of(p, work, warp + 1) - at, tile = at / p.chunks, chunk = at % p.chunks, from = nullptr;
    if (left != 0) find(p, work);
  }

  // The item's first byte.
  __device__ __forceinline__ void find(const P& p, const Work& work) {
    uint32_t number = tile;
    const uint8_t* const blocks = matrix_of(p, work, number);
    from = blocks + (uint64_t(number) * p.blocks + chunk * Block::kItemBlocks) * Block::kBytes;
  }

  // Copies the next item, if there is one, and goes on. A group of copies ends in any case.
  __device__ __forceinline__ void copy_next(uint8_t* to, const P& p, const Work& work) {
    if (left != 0) {
      const uint32_t blocks = min(p.blocks - chunk * Block::kItemBlocks, uint32_t(Block::kItemBlocks));
      const uint32_t bytes = blocks * Block::kBytes;
#pragma unroll
      for (uint32_t i = 0; i < kItemBytes; i += 512) {
        const uint32_t at = i + threadIdx.x % 32 * 16;
        if (at < bytes) copy_async(to + at, from + at);
      }
      from += bytes, ++chunk, --left;
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

// What a warp multiplies: the rows of x of a lane, and the factors of the sums that it holds, which are those of rows
// 2t and 2t + 1; the same for all tiles.
struct Rows {
  X of_lane;
  float2 factor_of_lane;

  __device__ __forceinline__ X x(uint32_t) const {
    return of_lane;
  }
  __device__ __forceinline__ float2 factor(uint32_t) const {
    return factor_of_lane;
  }
};

// The same for block types with a factor.
struct RowsAndFactors : Rows {
  const Arguments& p;
  const Work& work;

  __device__ __forceinline__ float2 factor(uint32_t tile) const {
    const float own = place_of(p, work.unit, tile).factor;
    return {factor_of_lane.x * own, factor_of_lane.y * own};
  }
};

// The warp's run of items; `input` says what meets each tile. A warp without items leaves zeros, because it can be
// between two warps of a tile.
template <class Block, class P, class Input>
__device__ __forceinline__ void sum_run(const P& p, const Shares& shares, const Work& work, const Input& input,
                                        uint8_t* ring, Reader<Block, P>& reader) {
  const uint32_t warp = threadIdx.x / 32, at = begin_of(p, work, warp);
  uint32_t left = begin_of(p, work, warp + 1) - at, tile = at / p.chunks, chunk = at % p.chunks, stage = 0;
  constexpr uint32_t kItemColumns = Block::kItemBlocks * Block::kColumns;
  constexpr uint32_t kItemRuns = Block::kRun == 0 ? 0 : kItemColumns / (Block::kRun + (Block::kRun == 0));
  float sum[4] = {};
  if (left == 0) leave_share(shares, sum, tile, p.rows);
#pragma unroll 1
  while (left != 0) {
    uint8_t* const item = ring + stage * Reader<Block, P>::kItemBytes;
    const X& x = input.x(tile);
    const X here = {x.values + chunk * (2 * kItemColumns), x.sums + chunk * (2 * kItemRuns), x.low, x.is_row, x.table};
    wait_for_oldest(p.stages);
    Block::product(sum, item, here, int(p.blocks - chunk * Block::kItemBlocks));
    __syncwarp();  // all lanes have read the item
    reader.copy_next(item, p, work);
    stage = stage + 1 == p.stages ? 0 : stage + 1;
    const bool ends = chunk + 1 == p.chunks;
    if (chunk == 0) shares.owners[tile].first = uint16_t(warp);
    if (ends) shares.owners[tile].last = uint16_t(warp);
    if (--left == 0 || ends) {
      const float2 factor = input.factor(tile);
      sum[0] *= factor.x, sum[1] *= factor.y, sum[2] *= factor.x, sum[3] *= factor.y;
      leave_share(shares, sum, tile, p.rows);
    }
    chunk = ends ? 0 : chunk + 1, tile += ends;
  }
}

// Rows first .. first + rows - 1 of x to shared memory, scaled; at most kMostRows of them.
template <typename T, class P>
__device__ __forceinline__ void stage(const P& p, const Layout& at, const void* x, uint32_t first, int rows,
                                      const Places& places) {
  uint8_t* const shared = shared_memory();
  stage_scaled(shared + at.x + first * p.x_stride, p.x_stride, static_cast<const T*>(x) + uint64_t(first) * p.in,
               int(p.in), rows, places, p.extras, reinterpret_cast<float*>(shared + at.scratch),
               reinterpret_cast<uint32_t*>(shared + at.largest), reinterpret_cast<float*>(shared + at.factors) + first);
}

template <class Block>
__global__ void __launch_bounds__(32 * kMostWarps, 1)
    gguf_gemv_kernel(const __grid_constant__ Arguments p, const void* x, void* y) {
  uint8_t* const shared = shared_memory();
  const Layout at = layout_of(p, Reader<Block, Arguments>::kItemBytes, Block::kTableBytes);
  const Shares shares = {reinterpret_cast<float*>(shared + at.shares), reinterpret_cast<Owners*>(shared + at.owners)};
  const uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  uint8_t* const ring = shared + at.ring + warp * p.stages * Reader<Block, Arguments>::kItemBytes;
  const Work work = work_of(p);
  Reader<Block, Arguments> reader(p, work, warp);
#pragma unroll 1
  for (uint32_t i = 0; i < p.stages; ++i) reader.copy_next(ring + i * Reader<Block, Arguments>::kItemBytes, p, work);
  Block::fill_table(shared);
  dependency_wait();
  release_dependents();
  if (p.bf16) {
    stage<__nv_bfloat16>(p, at, x, 0, p.rows, Places{p.places});
  } else {
    stage<__half>(p, at, x, 0, p.rows, Places{p.places});
  }
  if constexpr (Block::kRun != 0) {
    sum_columns<Block::kRun>(shared + at.sums, p.sum_stride, p.sum_low, shared + at.x, p.x_stride, int(p.in), p.rows);
    __syncthreads();
  }
  const bool is_row = int(g) < p.rows;
  const float* const factors = reinterpret_cast<const float*>(shared + at.factors);
  const Rows rows = {{shared + at.x + (is_row ? g : 0) * p.x_stride, shared + at.sums + (is_row ? g : 0) * p.sum_stride,
                      p.sum_low, is_row, shared},
                     {factors[2 * t], factors[2 * t + 1]}};
  if constexpr (kHasFactor<Block>) {
    sum_run<Block>(p, shares, work, RowsAndFactors{rows, p, work}, ring, reader);
  } else {
    sum_run<Block>(p, shares, work, rows, ring, reader);
  }
  __syncthreads();
  if (p.bf16) {
    write_tiles<__nv_bfloat16>(p, shares, work, y);
  } else {
    write_tiles<__half>(p, shares, work, y);
  }
}

}  // namespace localq::gguf
