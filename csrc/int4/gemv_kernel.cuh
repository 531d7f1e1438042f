// The kernel of int4_gemv; see gemv.cu.
#pragma once

#include "common/launch.h"
#include "int4/gemv.cuh"

namespace localq::int4 {

// An item as a lane reads it. `blocks` of its chunk exist; 0: there is no such item.
struct Item {
  const uint8_t* codes;
  const uint32_t* scales;  // of the first group of the tile
  const uint8_t* zeros;
  uint32_t chunk;
  int blocks;
};

__device__ __forceinline__ Item item_at(const Arguments& p, uint32_t unit, uint32_t tile, uint32_t chunk) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4;
  const Segment& w = place_of(p, unit, tile);
  const uint64_t block = uint64_t(tile) * p.blocks + chunk * kChunk, group = uint64_t(tile) * p.groups;
  return {w.codes + block * kBlockBytes + lane * 16, w.scales + group * 8 + g, w.zeros + group * 8 + g, chunk,
          int(p.blocks - chunk * kChunk)};
}

// The next item of the same tile.
__device__ __forceinline__ Item item_behind(const Item& item) {
  return {item.codes + kChunk * kBlockBytes, item.scales, item.zeros, item.chunk + 1, item.blocks - kChunk};
}

__device__ __forceinline__ void load_ring(uint4 (&ring)[kChunk], const Item& item) {
#pragma unroll
  for (int u = 0; u < kChunk; ++u) load_codes(ring[u], item.codes + u * kBlockBytes, item.blocks, u);
}

// Scales and zero points of an item: lane 4 g + t has those of rows g and g + 8 of kOwn groups, from group t * kOwn.
template <int kGroup>
struct Stored {
  static constexpr int kOwn = kChunkColumns / kGroup / 4;
  uint32_t scales[kOwn], zeros;
};

template <int kGroup>
__device__ __forceinline__ void load_stored(Stored<kGroup>& stored, const Arguments& p, const Item& item) {
  constexpr int kOwn = Stored<kGroup>::kOwn;
  if (item.blocks == 0) return;
  const uint32_t first = (item.chunk * 4 + threadIdx.x % 4) * kOwn, last = p.blocks * kBlock / kGroup - 1;
  stored.zeros = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const uint32_t group = uint32_t(uint64_t(min(first + i, last)) * p.of_columns >> 31);
    stored.scales[i] = __ldg(item.scales + group * 8);
    stored.zeros |= uint32_t(__ldg(item.zeros + group * 8)) << (8 * i);
  }
}

template <typename T, int kGroup>
struct Scales {
  static constexpr int kOwn = Stored<kGroup>::kOwn;
  float low[kOwn], high[kOwn];
  uint32_t zeros;

  __device__ __forceinline__ Scales(const Stored<kGroup>& stored, bool bf16) : zeros(stored.zeros) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const uint32_t pair = stored.scales[i];
      const float2 halves = __half22float2(as<__half2>(pair));
      low[i] = (bf16 ? __uint_as_float(pair << 16) : halves.x) * Nibble<T>::kBack;
      high[i] = (bf16 ? __uint_as_float(pair & 0xffff0000u) : halves.y) * (Nibble<T>::kBack / 16.f);
    }
  }
};

// Blocks of x in registers. If there is room for two, the next is loaded while one is multiplied.
template <int kGroup>
constexpr int kAhead = kGroup == 128 ? 2 : 1;

// The row of x that a lane reads. Missing rows are zeros: their columns are ignored, and products of zeros draw less
// power, which limits sustained decoding.
struct XSource {
  const uint8_t* x;
  int blocks;  // of 64 columns
};

template <typename T>
__device__ __forceinline__ XSource x_source(const Arguments& p, const uint8_t* staged, const T* x) {
  const uint32_t lane = threadIdx.x % 32, row = lane / 4;
  if (row >= uint32_t(p.rows)) return {staged, 0};
  const uint8_t* from = p.x_stride != 0
                            ? staged + row * p.x_stride
                            : reinterpret_cast<const uint8_t*>(x) + uint64_t(row) * p.blocks * kBlock * sizeof(T);
  return {from + lane % 4 * 16, int(p.blocks)};
}

// sum += scale * c if more than `needed` blocks are `left`. One volatile asm statement without a branch.
__device__ __forceinline__ void add_scaled(float (&sum)[4], const float (&c)[4], float low, float high, int left,
                                           int needed) {
#ifdef __CUDA_ARCH__
  asm volatile(
      "{.reg .pred p; setp.gt.s32 p, %10, %11;"
      "@p fma.rn.f32 %0, %8, %4, %0; @p fma.rn.f32 %1, %8, %5, %1;"
      "@p fma.rn.f32 %2, %9, %6, %2; @p fma.rn.f32 %3, %9, %7, %3;}"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]), "f"(low), "f"(high), "r"(left), "r"(needed));
#else
  if (left <= needed) return;
  for (int i = 0; i < 4; ++i) sum[i] = std::fma(i < 2 ? low : high, c[i], sum[i]);
#endif
}

// Scale and zero point of a group, the same in all lanes of a row.
struct Affine {
  float low, high;
  uint32_t zeros;  // one byte per group: `group` % kOwn
};

template <typename T, int kGroup>
__device__ __forceinline__ Affine affine_of(const Scales<T, kGroup>& scales, int group) {
  constexpr int kOwn = Stored<kGroup>::kOwn;
  const int owner = int(threadIdx.x % 32 / 4 * 4) + group / kOwn;
  return {__shfl_sync(~0u, scales.low[group % kOwn], owner), __shfl_sync(~0u, scales.high[group % kOwn], owner),
          __shfl_sync(~0u, scales.zeros, owner)};
}

// One item, whose codes are in `ring`: adds 16 rows x 8 rows of x to `sum` (the lane has rows g and g + 8, rows 2 t and
// 2 t + 1 of x) and refills the ring with `next`. `b` holds zeros for missing rows of x, and keeps them. The operands
// of the next group are loaded when a group begins.
template <typename T, int kGroup>
__device__ __forceinline__ void sum_item(float (&sum)[4], uint4 (&ring)[kChunk], uint32_t (&b)[kAhead<kGroup>][8],
                                         const XSource& x, const Item& item, const Scales<T, kGroup>& scales,
                                         const Item& next) {
  constexpr int kGroups = kChunkColumns / kGroup, kOwn = Stored<kGroup>::kOwn;
  const uint8_t* const from = x.x + item.chunk * (kChunkColumns * sizeof(T));
  const int left = x.blocks - int(item.chunk * kChunk);
  Affine here = {}, ahead = affine_of(scales, 0);
  float c[4];
  uint32_t zeros[2];
  if (kAhead<kGroup> == 2) load_x(b[0], from, left, 0);
#pragma unroll
  for (int u = 0; u < kChunk; ++u) {
    const int read = u + kAhead<kGroup> - 1;
    if (read < kChunk) load_x(b[read % kAhead<kGroup>], from + read * kBlock * sizeof(T), left, read);
    const uint32_t words[4] = {ring[u].x, ring[u].y, ring[u].z, ring[u].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = kBlock * u + 32 * (i / 2), group = column / kGroup;
      if (i % 2 == 0 && column % kGroup == 0) {  // first column of a group
        here = ahead;
        if (group + 1 < kGroups) ahead = affine_of(scales, group + 1);
        spread_zeros<T>(zeros, here.zeros, group % kOwn);
        c[0] = c[1] = c[2] = c[3] = 0.f;
      }
      uint32_t a[4];
      decode<T>(a, words[i], zeros);
      const uint32_t (&operand)[8] = b[u % kAhead<kGroup>];
      mma(c, a, operand[2 * i], operand[2 * i + 1], T{});
      if (i % 2 == 1 && (column + 32) % kGroup == 0) {  // last column of a group
        add_scaled(sum, c, here.low, here.high, item.blocks, u);
      }
    }
    load_codes(ring[u], next.codes + u * kBlockBytes, next.blocks, u);
  }
}

// The warp's run of items; `item` is the first, and the ring and `stored` are its. A warp without items leaves zeros,
// because it can be between two warps of a tile.
template <typename T, int kGroup>
__device__ __forceinline__ void sum_run(const Arguments& p, const Shares& shares, const XSource& x, const Work& work,
                                        Item item, uint4 (&ring)[kChunk], Stored<kGroup>& stored) {
  const uint32_t warp = threadIdx.x / 32, at = begin_of(p, work, warp);
  uint32_t left = begin_of(p, work, warp + 1) - at, tile = at / p.chunks;
  float sum[4] = {};
  uint32_t b[kAhead<kGroup>][8] = {};
  if (left == 0) leave_share(shares, sum, tile, p.rows);
#pragma unroll 1
  while (left != 0) {
    const Scales<T, kGroup> scales(stored, p.scales_bf16);
    const bool ends = item.chunk + 1 == p.chunks;
    if (item.chunk == 0) shares.owners[tile].first = uint16_t(warp);
    Item next = item_behind(item);
    if (--left == 0) {
      next.blocks = 0;
    } else if (ends) {
      next = item_at(p, work.unit, tile + 1, 0);
    }
    load_stored(stored, p, next);
    sum_item<T, kGroup>(sum, ring, b, x, item, scales, next);
    if (ends) shares.owners[tile].last = uint16_t(warp);
    if (ends || left == 0) leave_share(shares, sum, tile, p.rows);
    tile += ends;
    item = next;
  }
}

// Eight columns of x in the order of the weights, from packed column 8 i.
template <typename T>
__device__ __forceinline__ Eight<T> ordered(const T* x, const uint16_t* order, uint32_t i) {
  const uint4 packed = reinterpret_cast<const uint4*>(order)[i];
  const uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};
  Eight<T> eight;
#pragma unroll
  for (int k = 0; k < 8; ++k) eight.value[k] = x[pairs[k / 2] >> (k % 2 * 16) & 0xffffu];
  return eight;
}

// Copies x to shared memory, row by row with a stride, in the column order of the weights; a single row with its norm.
// Called by all threads; the block must synchronize afterwards.
template <typename T>
__device__ __forceinline__ void stage(const Arguments& p, uint8_t* staged, const T* x, float* scratch) {
  const uint32_t words = p.blocks * (kBlock / 8);
  float squares = 0.f;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < p.rows * words; i += kThreads) {
    const uint32_t row = i / words, word = i % words;
    const T* from = x + uint64_t(row) * words * 8;
    const Eight<T> eight =
        p.order != nullptr ? ordered(from, p.order, word) : reinterpret_cast<const Eight<T>*>(from)[word];
    reinterpret_cast<Eight<T>*>(staged + row * p.x_stride)[word] = eight;
#pragma unroll
    for (int k = 0; k < 8; ++k) squares += to_float(eight.value[k]) * to_float(eight.value[k]);
  }
  if (p.extras.norm == NormKind::kNone) return;
  const float inverse_rms = rsqrtf(block_sum(squares, scratch) / (words * 8) + p.extras.eps);
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < words * 8; i += kThreads) {
    T& value = reinterpret_cast<T*>(staged)[i];
    value = normed(value, inverse_rms, p.extras.norm_weight, p.order != nullptr ? p.order[i] : i, p.extras.norm);
  }
}

template <typename T, int kGroup>
__global__ void __launch_bounds__(kThreads, 1)
    int4_gemv_kernel(const __grid_constant__ Arguments p, const T* x, void* y) {
  float* const scratch = reinterpret_cast<float*>(shared_memory());
  const Shares shares = {scratch + kWarps, reinterpret_cast<Owners*>(scratch + kWarps + share_floats(p))};
  uint8_t* const staged = reinterpret_cast<uint8_t*>(shares.owners + (p.most_tiles + 3) / 4 * 4);
  const Work work = work_of(p);
  const uint32_t warp = threadIdx.x / 32, at = begin_of(p, work, warp);
  Item item = {};
  if (at < begin_of(p, work, warp + 1)) item = item_at(p, work.unit, at / p.chunks, at % p.chunks);
  uint4 ring[kChunk] = {};
  Stored<kGroup> stored = {};
  load_stored(stored, p, item);
  load_ring(ring, item);
  dependency_wait();
  release_dependents();
  if (p.x_stride != 0) stage(p, staged, x, scratch);
  __syncthreads();
  sum_run<T, kGroup>(p, shares, x_source(p, staged, x), work, item, ring, stored);
  __syncthreads();
  write_tiles<T>(p, shares, work, y);
}

}  // namespace localq::int4
