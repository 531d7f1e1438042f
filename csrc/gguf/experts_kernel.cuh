// Kernels of gguf_experts_gate_up and gguf_experts_down; see experts.cu.
#pragma once

#include "gguf/gemv_kernel.cuh"

namespace localq::gguf {

constexpr int kMostChosen = 16;

// A launch (tile_shares.cuh). Of gate and up, a unit is a tile of the gate and of the up projection of one chosen
// expert, and y is T [chosen, out]; of down, it is the tile of every chosen expert that adds to the same 16 results. Of
// gate or up alone (parts 1) a unit is a tile; the gates go to `gates`, and the ups find them there.
struct ExpertArguments {
  static constexpr int kMostInputs = kMostChosen;

  const uint64_t* table;        // u64 [experts, parts of an expert]
  const float* matrix_factors;  // f32 of the same shape, or null: of block types that have them
  const int32_t* chosen;
  const float* weights;  // of down; null for gate and up
  float* gates;          // f32 [chosen, out]
  const void* residual;
  GemvExtras extras;               // its norm
  uint32_t experts, count, tiles;  // count: chosen ones; tiles of a matrix
  uint32_t units_each, units_more, parts, first_part;
  uint32_t in, blocks, chunks;
  uint32_t warps, stages;
  uint32_t x_stride, sum_stride, sum_low;
  uint32_t most_tiles;
  int rows;  // of partial sums: 1
  bool bf16, early;

  __host__ __device__ __forceinline__ bool is_down() const {
    return weights != nullptr;
  }
  // Rows of x in shared memory.
  __host__ __device__ __forceinline__ uint32_t inputs() const {
    return is_down() ? count : 1;
  }
};

// The place in the table of the matrix of tile `tile` of the block, and the tile's number there.
__device__ __forceinline__ uint32_t entry_of(const ExpertArguments& p, const Work& work, uint32_t& tile) {
  const uint32_t unit = work.unit + tile / p.parts, part = tile % p.parts;
  const uint32_t slot = p.is_down() ? part : unit / p.tiles;
  tile = p.is_down() ? unit : unit % p.tiles;
  const uint32_t expert = uint32_t(min(max(p.chosen[slot], 0), int(p.experts) - 1));
  return p.is_down() ? expert : 2 * expert + p.first_part + part;
}

__device__ __forceinline__ const uint8_t* matrix_of(const ExpertArguments& p, const Work& work, uint32_t& tile) {
  return reinterpret_cast<const uint8_t*>(p.table[entry_of(p, work, tile)]);
}

// One row of x meets a tile, in column 0 of the products: of down that of the tile's expert.
struct ExpertRows {
  X first;
  uint32_t parts, x_stride, sum_stride;  // parts 1: the same row for all tiles
  const float* factors;

  __device__ __forceinline__ X x(uint32_t tile) const {
    const uint32_t row = tile % parts;
    return {first.values + row * x_stride, first.sums + row * sum_stride, first.low, first.is_row, first.table};
  }
  __device__ __forceinline__ float2 factor(uint32_t tile) const {
    const float one = factors[tile % parts];
    return {one, one};
  }
};

// The same for block types with a factor.
struct ExpertRowsAndFactors : ExpertRows {
  const ExpertArguments& p;
  const Work& work;

  __device__ __forceinline__ float2 factor(uint32_t tile) const {
    const float2 of_x = ExpertRows::factor(tile);
    const float own = p.matrix_factors == nullptr ? 1.f : p.matrix_factors[entry_of(p, work, tile)];
    return {of_x.x * own, of_x.y * own};
  }
};

template <typename T>
__device__ __forceinline__ void write_gate_up(const ExpertArguments& p, const Shares& shares, const Work& work, T* y) {
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < work.tiles / p.parts * kTileRows; i += 32 * p.warps) {
    const uint32_t unit = work.unit + i / kTileRows, tile = i / kTileRows * p.parts, r = i % kTileRows;
    const uint64_t at = uint64_t(unit) * kTileRows + r;  // of [chosen, out]
    const float first = sum_shares(shares, tile, r, 0, 1);
    if (p.parts == 1 && p.first_part == 0) {
      p.gates[at] = first;
    } else {
      const float gate = p.parts == 1 ? p.gates[at] : first;
      const float up = p.parts == 1 ? first : sum_shares(shares, tile + 1, r, 0, 1);
      round_to(activate(gate, p.extras.activation) * up, y[at]);
    }
  }
}

// One thread per result and expert. Those of a result are adjacent in a warp and are added in the order of `chosen`.
template <typename T>
__device__ __forceinline__ void write_down(const ExpertArguments& p, const Shares& shares, const Work& work, T* y) {
  uint32_t lanes = 1;  // of a result
  while (lanes < p.count) lanes *= 2;
  const uint32_t count = work.tiles / p.parts * kTileRows * lanes;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < (count + 31) / 32 * 32; i += 32 * p.warps) {  // in whole warps
    const uint32_t slot = i % lanes, r = i / lanes % kTileRows, unit = i / lanes / kTileRows;
    const uint32_t o = (work.unit + unit) * kTileRows + r;
    const bool writes = slot == 0 && i < count;
    float value = 0.f, added = 0.f;
    if (writes && p.residual != nullptr) added = to_float(static_cast<const T*>(p.residual)[o]);
    if (slot < p.count && i < count) value = p.weights[slot] * sum_shares(shares, unit * p.parts + slot, r, 0, 1);
    const int first = int(threadIdx.x % 32 / lanes * lanes);
    float total = 0.f;
#pragma unroll 1
    for (uint32_t j = 0; j < p.count; ++j) total += __shfl_sync(~0u, value, first + int(j));
    if (writes) round_to(total + added, y[o]);
  }
}

template <typename T>
__device__ __forceinline__ void stage_inputs(const ExpertArguments& p, const Layout& at, const void* x) {
#pragma unroll 1
  for (uint32_t first = 0; first < p.inputs(); first += kMostRows) {
    stage<T>(p, at, x, first, int(min(p.inputs() - first, uint32_t(kMostRows))), Places{});
  }
}

template <typename T>
__device__ __forceinline__ void write_results(const ExpertArguments& p, const Shares& shares, const Work& work,
                                              void* y) {
  if (p.is_down()) {
    write_down<T>(p, shares, work, static_cast<T*>(y));
  } else {
    write_gate_up<T>(p, shares, work, static_cast<T*>(y));
  }
}

template <class Block>
__global__ void __launch_bounds__(32 * kMostWarps, 1)
    gguf_experts_kernel(const __grid_constant__ ExpertArguments p, const void* x, void* y) {
  uint8_t* const shared = shared_memory();
  constexpr uint32_t kItemBytes = Reader<Block, ExpertArguments>::kItemBytes;
  const Layout at = layout_of(p, kItemBytes, Block::kTableBytes);
  const Shares shares = {reinterpret_cast<float*>(shared + at.shares), reinterpret_cast<Owners*>(shared + at.owners)};
  const uint32_t warp = threadIdx.x / 32;
  uint8_t* const ring = shared + at.ring + warp * p.stages * kItemBytes;
  const Work work = work_of(p);
  Block::fill_table(shared);
  if (!p.early) dependency_wait();  // the choice has been made
  Reader<Block, ExpertArguments> reader(p, work, warp);
#pragma unroll 1
  for (uint32_t i = 0; i < p.stages; ++i) reader.copy_next(ring + i * kItemBytes, p, work);
  if (p.early) dependency_wait();
  release_dependents();
  if (p.bf16) {
    stage_inputs<__nv_bfloat16>(p, at, x);
  } else {
    stage_inputs<__half>(p, at, x);
  }
  if constexpr (Block::kRun != 0) {
    sum_columns<Block::kRun>(shared + at.sums, p.sum_stride, p.sum_low, shared + at.x, p.x_stride, int(p.in),
                             int(p.inputs()));
    __syncthreads();
  }
  const X first = {shared + at.x, shared + at.sums, p.sum_low, threadIdx.x % 32 < 4, shared};
  const ExpertRows rows = {first, p.is_down() ? p.parts : 1, p.x_stride, p.sum_stride,
                           reinterpret_cast<const float*>(shared + at.factors)};
  if constexpr (kHasFactor<Block>) {
    sum_run<Block>(p, shares, work, ExpertRowsAndFactors{rows, p, work}, ring, reader);
  } else {
    sum_run<Block>(p, shares, work, rows, ring, reader);
  }
  __syncthreads();
  if (p.bf16) {
    write_results<__nv_bfloat16>(p, shares, work, y);
  } else {
    write_results<__half>(p, shares, work, y);
  }
}

}  // namespace localq::gguf
