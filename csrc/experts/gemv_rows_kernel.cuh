// gemv.cuh for 2 to 4 rows of x and dense matrices in MXFP4: weights are decoded once for all rows. (With 8 rows
// at a time the sums would not fit the registers.)
//
// A product has two rows of x, in columns 0 to 3 and 4 to 7 of B; lanes with t < 2 hold sums of the first, the others
// of the second, each of low row g and of high row g. Of the scales a lane has one row's, the lane beside it (t xor 2)
// the other's. Each row of x has a power of two of its own.
#pragma once

#include "common/mma.cuh"
#include "experts/gemv_kernel.cuh"

namespace localq {

// Fewer loads in flight: registers hold the sums of all rows.
template <typename T>
using RowsFormat = Mxfp4Blocks<T, 2>;

constexpr uint32_t kFactorsAt = 64;  // bytes into shared memory: what sums are multiplied with, f32 [8]

template <int kPairs>
__device__ __forceinline__ float* factors_of(const BlockShared& s) {
  static_assert(kFactorsAt + 8 * kPairs <= kZerosAt, "between what warps tell each other and the zeros");
  return reinterpret_cast<float*>(s.table + kFactorsAt);
}

// x T [rows, in] to shared memory as stage_block_x has it, rows that are not there as zeros; the same number of warps
// for each. All threads; afterwards the block must synchronise.
template <typename T, int kPairs>
__device__ __forceinline__ void stage_rows_x(const BlockGemv& p, const BlockShared& s, const T* x, uint32_t rows) {
  constexpr uint32_t kRows = 2 * kPairs, kOfRow = kBlockThreads / kRows;
  const uint32_t row = threadIdx.x / kOfRow, mine = threadIdx.x % kOfRow, words = p.in / 8;
  auto* to = reinterpret_cast<Eight<T>*>(s.x + row * p.x_stride);
  const auto* from = reinterpret_cast<const Eight<T>*>(x + uint64_t(row) * p.in);
  float largest = 0.f;
#pragma unroll 4
  for (uint32_t i = mine; i < words; i += kOfRow) {
    const Eight<T> eight = row < rows ? from[i] : Eight<T>{};
    to[i] = eight;
    largest = fmaxf(largest, largest_of(eight));
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  if (threadIdx.x % 32 == 0) s.scratch[threadIdx.x / 32] = largest;
  __syncthreads();
  for (uint32_t warp = 0; warp < kOfRow / 32; ++warp) largest = fmaxf(largest, s.scratch[row * (kOfRow / 32) + warp]);
  const float factor = std::is_same<T, __half>::value ? 1.f : half_factor(largest);
  for (uint32_t i = mine; i < words; i += kOfRow) {  // each thread what it wrote itself
    reinterpret_cast<Eight<__half>*>(to)[i] = in_half(to[i], factor);
  }
  for (uint32_t i = words + mine; i < p.x_stride / 16; i += kOfRow) reinterpret_cast<uint4*>(to)[i] = uint4{};
  if (mine == 0) factors_of<kPairs>(s)[row] = RowsFormat<T>::kSumScale / factor;
}

// The sums of a step with all rows: sum[q][h] is that of row 2 q + (t >= 2) of x with the low or high row.
template <typename T, int kPairs>
__device__ __forceinline__ void add_step(float (&sum)[kPairs][2], const Step<RowsFormat<T>>& step, uint32_t x,
                                         uint32_t pair_bytes) {
  using Format = RowsFormat<T>;
  const uint32_t lows[4] = {step.low.x, step.low.y, step.low.z, step.low.w};
  const uint32_t highs[4] = {step.high.x, step.high.y, step.high.z, step.high.w};
  float c[kPairs][4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t l[4], h[4];
    Format::decode(l, lows[i]);
    Format::decode(h, highs[i]);
#pragma unroll
    for (int q = 0; q < kPairs; ++q) {
      const uint4 word = load_word(x + q * pair_bytes + 16 * i);
      mma(c[q], {l[0], h[0], l[1], h[1]}, word.x, word.y, __half{});
      mma(c[q], {l[2], h[2], l[3], h[3]}, word.z, word.w, __half{});
    }
  }
  const uint32_t other = __shfl_xor_sync(~0u, step.scale, 2);
  const bool first = threadIdx.x % 4 < 2;
  const uint32_t low = first ? step.scale : other, high = first ? other : step.scale;
  const float scale[4] = {Format::power(low << 23), Format::power(low << 15), Format::power(high << 23),
                          Format::power(high << 15)};
#pragma unroll
  for (int q = 0; q < kPairs; ++q) {
    sum[q][0] = fmaf(c[q][1], scale[1], fmaf(c[q][0], scale[0], sum[q][0]));
    sum[q][1] = fmaf(c[q][3], scale[3], fmaf(c[q][2], scale[2], sum[q][1]));
  }
}

// Leaves the warp's sums of a tile, which are then zero.
template <int kPairs>
__device__ __forceinline__ void leave_rows(float* share, float (&sum)[kPairs][2]) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int q = 0; q < kPairs; ++q) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float both = sum[q][h] + __shfl_xor_sync(~0u, sum[q][h], 1);
      if (t % 2 == 0) share[(h * kHalfTile + g) * 2 * kPairs + 2 * q + t / 2] = both;
      sum[q][h] = 0.f;
    }
  }
}

// The warp's items; the ring holds the first of them, which is `next`. As sum_run.
template <typename T, int kPairs>
__device__ __forceinline__ void sum_run_rows(const BlockGemv& p, const BlockShared& s, const UnitSpan& span,
                                             const ItemRun& run, LaneTile next,
                                             Step<RowsFormat<T>> (&ring)[RowsFormat<T>::kSteps]) {
  using Format = RowsFormat<T>;
  const uint32_t warp = threadIdx.x / 32, column = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const bool counts = column % 4 == t;
  const uint32_t begin = shared_address(counts ? s.x + column / 4 * p.x_stride + 64 * t : s.zeros);
  const uint32_t item_bytes = counts ? Format::kSteps * 256 : 0, pair_bytes = counts ? 2 * p.x_stride : 0;
  uint32_t tile = run.first / p.items, item = run.first % p.items;
  float sum[kPairs][2] = {};
#pragma unroll 1
  for (uint32_t left = run.end - run.first; left > 0; --left) {
    const uint32_t x = begin + item * item_bytes;
    const bool ends = ++item == p.items || left == 1;
    next = next.template from<Format>(Format::kSteps);
    if (left == 1) {
      next.left = kNothing;
    } else if (ends) {
      next = lane_tile<Format>(p, span, tile + 1);
    }
#pragma unroll
    for (int i = 0; i < Format::kSteps; ++i) {
      add_step<T, kPairs>(sum, ring[i], x + i * 256, pair_bytes);
      ring[i].load(p, next, i);
    }
    if (!ends) continue;
    leave_rows<kPairs>(s.shares + (tile + warp) * kTileRows * 2 * kPairs, sum);
    item = 0, ++tile;
  }
}

// p.rows is 2 kPairs; `rows` of them are there.
template <typename T, int kPairs>
__global__ void __launch_bounds__(kBlockThreads, 1)
    block_gemv_rows_kernel(const __grid_constant__ BlockGemv p, const T* x, void* y) {
  using Format = RowsFormat<T>;
  const UnitSpan span = unit_span(p);
  const BlockShared s = carve<Format>(shared_memory(), p, span.tiles);
  const ItemRun run = item_run(p, span);
  const uint32_t rows = p.slots;
  LaneTile item = {nullptr, nullptr, nullptr, kNothing};
  if (run.first < run.end) {
    item = lane_tile<Format>(p, span, run.first / p.items).template from<Format>(run.first % p.items * Format::kSteps);
  }
  Step<Format> ring[Format::kSteps];
#pragma unroll
  for (int i = 0; i < Format::kSteps; ++i) ring[i].load(p, item, i);
  dependency_wait();
  release_dependents();
  const float bias = bias_at<T>(p, span, threadIdx.x);
  stage_rows_x<T, kPairs>(p, s, x, rows);
  stage_biases<T>(p, s, span, bias);
  if (threadIdx.x < Format::kSteps * 16) reinterpret_cast<uint4*>(const_cast<uint8_t*>(s.zeros))[threadIdx.x] = {};
  __syncthreads();
  sum_run_rows<T, kPairs>(p, s, span, run, item, ring);
  __syncthreads();
  const float* factors = factors_of<kPairs>(s);
  write_dense<T>(p, s, span, run, rows, [factors](uint32_t row) { return factors[row]; }, y);
}

// `rows` rows of x, at most 2 kPairs.
template <typename T, int kPairs>
void launch_block_rows(const char* op, BlockGemv p, int rows, const void* x, void* y, int device, cudaStream_t stream) {
  p.rows = p.x_rows = 2 * kPairs;
  p.slots = uint32_t(rows);
  launch_blocks<RowsFormat<T>, T>(op, block_gemv_rows_kernel<T, kPairs>, p, x, y, device, stream);
}

}  // namespace localq
