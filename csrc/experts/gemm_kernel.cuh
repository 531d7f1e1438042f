// The kernel of experts_gemm; see gemm.cu.
#pragma once

#include "common/async_copies.cuh"
#include "common/launch.h"
#include "common/rounding.cuh"
#include "experts/gemm_formats.cuh"

namespace localq::grouped {

constexpr uint32_t kXStageBytes = kTokenTiles * kGroupWords * 16;

// Shared memory: the format's table; values of absmax codes; rows of x; scales of two stages; stages of codes and x,
// whose place the results take.
constexpr uint32_t kMapBytes = 4 * kNestedMapSize, kRowsBytes = 4 * kTokens;

template <class Format>
constexpr uint32_t kRowsOfBlock = Format::kWarps * kRowsOfWarp;
template <class Format>
constexpr uint32_t kScaleBytes = Format::kScales == 0 ? 0 : 2 * 8 * kRowsOfBlock<Format>;
template <class Format>
constexpr uint32_t kHeaderBytes = Format::kTableBytes + kMapBytes + kRowsBytes + kScaleBytes<Format>;
template <class Format>
constexpr uint32_t kStageBytes = Format::kStageBytes + kXStageBytes;
// Bytes between the results of two entries, in T.
template <class Format>
constexpr uint32_t kResultStride = 2 * kRowsOfBlock<Format> + 16;

template <class Format>
struct Shared {
  __device__ __forceinline__ uint8_t* table() const {
    return shared_memory();
  }
  __device__ __forceinline__ float* map() const {
    return reinterpret_cast<float*>(shared_memory() + Format::kTableBytes);
  }
  __device__ __forceinline__ int32_t* x_rows() const {
    return reinterpret_cast<int32_t*>(shared_memory() + Format::kTableBytes + kMapBytes);
  }
  __device__ __forceinline__ float2* scales(uint32_t stage) const {
    uint8_t* const first = shared_memory() + Format::kTableBytes + kMapBytes + kRowsBytes;
    return reinterpret_cast<float2*>(first) + stage % 2 * kRowsOfBlock<Format>;
  }
  __device__ __forceinline__ uint8_t* stage(uint32_t slot) const {
    return shared_memory() + kHeaderBytes<Format> + slot * kStageBytes<Format>;
  }
  __device__ __forceinline__ uint8_t* results() const {
    return stage(0);
  }
};

// The entries of a tile, of one expert.
struct Tile {
  uint32_t expert, begin, count;  // count 0: there is no such tile
};

// Tile `number` of the launch. Called by whole warps.
__device__ __forceinline__ Tile tile_of(const Arguments& p, uint32_t number) {
  const uint32_t lane = threadIdx.x % 32, last = p.first + p.experts;
  number += p.first == 0 ? 0 : uint32_t(p.tile_ends[p.first - 1]);
  uint32_t passed = 0;  // experts whose tiles all lie before
  for (uint32_t first = 0; first < last; first += 32) {
    const bool ends = first + lane < last && uint32_t(p.tile_ends[first + lane]) <= number;
    passed += uint32_t(__popc(__ballot_sync(~0u, ends)));
  }
  if (passed >= last) return {0, 0, 0};
  const uint32_t tile = passed == 0 ? 0 : uint32_t(p.tile_ends[passed - 1]);
  const uint32_t begin = (passed == 0 ? 0 : uint32_t(p.ends[passed - 1])) + (number - tile) * kTokens;
  return {passed - p.first, begin, min(uint32_t(p.ends[passed]) - begin, kTokens)};
}

// The rows of W of a block.
template <class Format>
struct BlockRows {
  uint32_t expert, row_block;

  // Number in the stack of row `local` of the block; rows behind the last repeat it.
  __device__ __forceinline__ uint64_t operator()(const Arguments& p, uint32_t local) const {
    constexpr uint32_t kPairs = kRowsOfBlock<Format> / 2;
    uint32_t row = 0;
    if (p.gated) {
      const uint32_t pair = min(row_block * kPairs + local % kPairs, p.width - 1), half = local / kPairs;
      row = p.interleaved ? 2 * pair + half : pair + half * p.width;
    } else {
      row = min(row_block * kRowsOfBlock<Format> + local, p.out - 1);
    }
    return uint64_t(expert) * p.out + row;
  }
};

// Copies 64 columns of the block's rows and of x to shared memory; columns that there are not are zeros.
template <class Format>
__device__ __forceinline__ void copy_stage(const Arguments& p, const Shared<Format>& s, const BlockRows<Format>& rows,
                                           uint32_t stage, uint32_t slot) {
  constexpr uint32_t kThreads = 32 * Format::kWarps, kWords = Format::kWords;
  uint8_t* const codes = s.stage(slot);
  uint8_t* const x = codes + Format::kStageBytes;
#pragma unroll
  for (uint32_t i = threadIdx.x; i < kRowsOfBlock<Format> * kWords; i += kThreads) {
    const uint32_t local = i / kWords, word = i % kWords, at = stage * kWords + word;
    const bool inside = at * 16 < p.row_bytes;
    copy_async_or_zero(codes + Format::word_at(local, word),
                       p.codes + rows(p, local) * p.row_bytes + (inside ? at * 16 : 0), inside);
  }
#pragma unroll
  for (uint32_t i = threadIdx.x; i < kTokens * 8; i += kThreads) {
    const uint32_t entry = i / 8, word = i % 8, at = stage * 8 + word;
    const bool inside = at * 8 < p.in;
    copy_async_or_zero(x + x_word_at(entry, word),
                       p.x + (uint64_t(s.x_rows()[entry]) * p.in + (inside ? at * 8 : 0)) * 2, inside);
  }
}

// Waits until the oldest of `depth` - 1 groups is there.
__device__ __forceinline__ void wait_for_oldest(uint32_t depth) {
  if (depth == 2) {
    wait_for_copies<0>();
  } else if (depth == 3) {
    wait_for_copies<1>();
  } else {
    wait_for_copies<2>();
  }
}

using Sums = float[2][kTokenTiles][4];

// Scales of rows g and g + 8 of a tile for the halves of 64 columns.
struct TileScales {
  float2 half[2];
};

// A thread's row of the block asks for its scales of `stage`.
template <class Format>
__device__ __forceinline__ void load_scales(typename Format::Stored& stored, const Arguments& p,
                                            const BlockRows<Format>& rows, uint32_t stage) {
  if (Format::kScales > 0 && stage < p.stages) stored = Format::load(p, rows(p, threadIdx.x), stage);
}

// ... and leaves them for all.
template <class Format>
__device__ __forceinline__ void leave_scales(const Arguments& p, const Shared<Format>& s,
                                             const typename Format::Stored& stored, uint32_t stage) {
  if constexpr (Format::kScales > 0) s.scales(stage)[threadIdx.x] = Format::scales(p, s.map(), stored);
}

template <class Format>
__device__ __forceinline__ TileScales scales_of(const Shared<Format>& s, uint32_t stage, uint32_t tile) {
  if constexpr (Format::kScales == 0) return {};
  const float2* const from = s.scales(stage) + 16 * tile + threadIdx.x % 32 / 4;
  const float2 low = from[0], high = from[8];
  return {{{low.x, high.x}, {low.y, high.y}}};
}

// sum += scale * c.
__device__ __forceinline__ void add_scaled(float (&sum)[4], const float (&c)[4], float2 scale) {
  sum[0] += scale.x * c[0], sum[1] += scale.x * c[1];
  sum[2] += scale.y * c[2], sum[3] += scale.y * c[3];
}

// sum += scales * (16 rows of W times 8 entries), over 64 columns.
template <typename T, class Format>
__device__ __forceinline__ void multiply(float (&sum)[4], const uint32_t (&a)[4][4], const uint32_t (&first)[4],
                                         const uint32_t (&second)[4], const TileScales& scales) {
  if constexpr (Format::kScales == 0) {
    mma(sum, a[0], first[0], first[1], T{}), mma(sum, a[1], first[2], first[3], T{});
    mma(sum, a[2], second[0], second[1], T{}), mma(sum, a[3], second[2], second[3], T{});
  } else {
    float c[4] = {};
    mma(c, a[0], first[0], first[1], T{}), mma(c, a[1], first[2], first[3], T{});
    if constexpr (Format::kScales == 2) {
      add_scaled(sum, c, scales.half[0]);
      c[0] = c[1] = c[2] = c[3] = 0.f;
    }
    mma(c, a[2], second[0], second[1], T{}), mma(c, a[3], second[2], second[3], T{});
    add_scaled(sum, c, scales.half[1]);
  }
}

template <typename T, class Format>
__device__ __forceinline__ void add_stage(Sums& sum, const Shared<Format>& s, uint32_t stage, uint32_t slot,
                                          uint32_t count) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const TileScales scales[2] = {scales_of(s, stage, 2 * warp), scales_of(s, stage, 2 * warp + 1)};
  uint32_t a[2][4][4];
#pragma unroll
  for (uint32_t j = 0; j < 2; ++j) Format::operands(a[j], s.table(), s.stage(slot), 2 * warp + j);
  const uint32_t x = shared_address(s.stage(slot) + Format::kStageBytes + lane * 16);
#pragma unroll
  for (uint32_t n = 0; n < kTokenTiles; ++n) {
    if (8 * n >= count) break;
    uint32_t first[4], second[4];
    load_words<0>(first, x + n * kGroupWords * 16);
    load_words<kSecondHalf * 16>(second, x + n * kGroupWords * 16);
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) multiply<T, Format>(sum[j][n], a[j], first, second, scales[j]);
  }
}

template <typename T, class Format>
__device__ __forceinline__ void sum_stages(Sums& sum, const Arguments& p, const Shared<Format>& s,
                                           BlockRows<Format> rows, uint32_t count) {
  typename Format::Stored stored = {};
  load_scales<Format>(stored, p, rows, 0);
  leave_scales<Format>(p, s, stored, 0);
  load_scales<Format>(stored, p, rows, 1);
  uint32_t slot = 0;
#pragma unroll 1
  for (uint32_t stage = 0; stage < p.stages; ++stage) {
    // Opaque to the compiler: it would otherwise keep addresses in registers, and spill.
    asm volatile("" : "+r"(rows.row_block), "+r"(rows.expert), "+r"(slot), "+r"(stage));
    wait_for_oldest(p.depth);
    __syncthreads();  // the stage and its scales are complete, and all threads have read the one before
    const uint32_t next = stage + p.depth - 1, free = slot == 0 ? p.depth - 1 : slot - 1;
    if (next < p.stages) copy_stage(p, s, rows, next, free);
    end_copies();
    if (stage + 1 < p.stages) leave_scales<Format>(p, s, stored, stage + 1);
    load_scales<Format>(stored, p, rows, stage + 2);
    add_stage<T>(sum, s, stage, slot, count);
    slot = slot + 1 == p.depth ? 0 : slot + 1;
  }
}

// Rounds the sums to T [entries][rows of the block] in shared memory.
template <typename T, class Format>
__device__ __forceinline__ void leave_results(const Sums& sum, const Arguments& p, const Shared<Format>& s,
                                              const BlockRows<Format>& rows) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
#pragma unroll
  for (uint32_t j = 0; j < 2; ++j) {
#pragma unroll
    for (uint32_t high = 0; high < 2; ++high) {
      const uint32_t local = kRowsOfWarp * warp + 16 * j + 8 * high + g;
      const float bias = p.bias == nullptr ? 0.f : to_float(static_cast<const T*>(p.bias)[rows(p, local)]);
#pragma unroll
      for (uint32_t n = 0; n < kTokenTiles; ++n) {
#pragma unroll
        for (uint32_t k = 0; k < 2; ++k) {
          T* const of_entry = reinterpret_cast<T*>(s.results() + (8 * n + 2 * t + k) * kResultStride<Format>);
          round_to(sum[j][n][2 * high + k] * Format::kSumScale + bias, of_entry[local]);
        }
      }
    }
  }
}

__device__ __forceinline__ float gate_of(const Arguments& p, float gate, float up) {
  if (!p.clamped) return gate / (1.f + __expf(-gate)) * up;
  gate = fminf(gate, p.limit), up = fminf(fmaxf(up, -p.limit), p.limit);
  return gate / (1.f + __expf(-p.alpha * gate)) * (up + 1.f);
}

// From shared memory to y, eight results at a time.
template <typename T, class Format>
__device__ __forceinline__ void write_results(const Arguments& p, const Shared<Format>& s, const Tile& tile,
                                              uint32_t row_block, T* y) {
  constexpr uint32_t kRows = kRowsOfBlock<Format>, kThreads = 32 * Format::kWarps;
  const uint32_t rows = p.gated ? kRows / 2 : kRows, words = rows / 8;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < tile.count * words; i += kThreads) {
    const uint32_t entry = i / words, column = i % words * 8, at = row_block * rows + column;
    if (at >= p.width) continue;
    const T* const from = reinterpret_cast<const T*>(s.results() + entry * kResultStride<Format>) + column;
    Eight<T> eight = *reinterpret_cast<const Eight<T>*>(from);
    if (p.gated) {
      const Eight<T> ups = *reinterpret_cast<const Eight<T>*>(from + kRows / 2);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        round_to(gate_of(p, to_float(eight.value[k]), to_float(ups.value[k])), eight.value[k]);
      }
    }
    *reinterpret_cast<Eight<T>*>(y + uint64_t(tile.begin + entry) * p.width + at) = eight;
  }
}

// Blocks on a multiprocessor, which limits registers. From compute capability 10.0 on ptxas spills with two; 12.0 has
// shared memory for one.
__device__ constexpr int least_blocks() {
#if __CUDA_ARCH__ >= 1000
  return 1;
#else
  return 2;
#endif
}

template <typename T, class Format>
__global__ void __launch_bounds__(32 * Format::kWarps, least_blocks())
    experts_gemm_kernel(const __grid_constant__ Arguments p, T* y) {
  const Shared<Format> s;
  const uint32_t row_block = blockIdx.x % p.row_blocks;
  Format::fill(s.table(), p);
  if (p.nested_map != nullptr) {
    for (uint32_t i = threadIdx.x; i < kNestedMapSize; i += blockDim.x) s.map()[i] = p.nested_map[i];
  }
  dependency_wait();
  release_dependents();
  const Tile tile = tile_of(p, blockIdx.x / p.row_blocks);
  if (tile.count == 0) return;
  for (uint32_t i = threadIdx.x; i < kTokens; i += blockDim.x) {  // entries that there are not repeat the last one
    const uint32_t place = tile.begin + min(i, tile.count - 1);
    s.x_rows()[i] = p.rows == nullptr ? int32_t(place) : p.rows[place];
  }
  __syncthreads();
  const BlockRows<Format> rows = {tile.expert, row_block};
#pragma unroll 1
  for (uint32_t stage = 0; stage + 1 < p.depth; ++stage) {
    if (stage < p.stages) copy_stage(p, s, rows, stage, stage);
    end_copies();
  }
  Sums sum = {};
  sum_stages<T>(sum, p, s, rows, tile.count);
  wait_for_copies<0>();
  __syncthreads();  // all have read the last stage
  leave_results<T>(sum, p, s, rows);
  __syncthreads();
  write_results(p, s, tile, row_block, y);
}

}  // namespace localq::grouped
