// y = extras(x W^T) for one row of x, W in NF4 (layout.cuh) in either order, up to three matrices with the same x; x,
// bias and residual in f16 or bf16; sums in f32, rounded once. Needs in % 64 == 0; out is arbitrary. Deterministic:
// every sum has a fixed order and there are no atomics.
//
// A tile is 16 results, an item 8 blocks (512 columns) of a tile. A block of threads owns consecutive tiles and holds
// the look-up table. Its warps take items round-robin regardless of the tile, so they finish together; each leaves 16
// partial sums per item in shared memory, which are added in column order at the end. If the last item of a row is
// shorter, a separate kernel (Order::kRagged in gemv_pipeline.cuh) pipelines it like the others. Where whole tiles are
// badly spread over the device, blocks take equal shares of items instead and join (gemv_shares.cuh).
//
// The 8 blocks of an item share one operand B: column c of B is x of block c, so lane (g, t) holds x of block g once.
// Of the product of block u only column u counts. It is in the lanes with t = u / 2, which are the lanes that hold the
// scales of blocks 2 t and 2 t + 1. A block thus costs 16 PRMT, 16 look-ups, 4 products and 2 FFMA.
//
// Bound: memory. Reads out*in*(1/2 + 1/64 + 4/16384) bytes once, 16 bytes per lane, with kDepth loads in flight across
// items; the first are issued before the kernel that produces x has ended. README.md has the instruction counts.
#include "nf4/gemv_kernel.cuh"
#include "nf4/gemv_launch.h"
#include "nf4/gemv_shares.cuh"

namespace localq {
namespace {

using namespace nf4_row;

constexpr int kPrefetch = 1;  // items per warp that are prefetched to L2 before x is available

// The sums of rows g and g + 8 over the lane's part of an item outside the fast path, block by block: a short tile, or
// a short chunk in row-wise order.
template <typename T>
__device__ __forceinline__ void sum_short_item(float (&sum)[2], const Nf4Gemv& p, const Shared& s, const T* x,
                                               const Cursor& cursor) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const TilePlace place = s.tiles.places[cursor.tile];
  const Nf4Segment& w = p.segment[place.segment()];
  const uint32_t end = min((cursor.chunk + 1) * kChunk, p.blocks);
#pragma unroll 1
  for (uint32_t block = cursor.chunk * kChunk; block < end; ++block) {
    const uint4 codes = load_codes(w, place.tile(), block, p.blocks);
    const float low = load_scale(p, w, place.tile(), g, block), high = load_scale(p, w, place.tile(), g + 8, block);
    uint32_t b[8];
    x_operand(b, s, x, block);
    if (g != 0) {
#pragma unroll
      for (int k = 0; k < 8; ++k) b[k] = 0;
    }
    float c[4] = {};
    multiply_block<T>(c, s.table, 4 * lane, codes, b);
    if (t == 0) sum[0] += low * c[0], sum[1] += high * c[2];
  }
}

// Blocks u0 .. u0 + 3 of a fast item, whose codes are in `ring`; refills it with four blocks from `codes`, of which
// `left` exist.
template <typename T, Order kOrder, int u0>
__device__ __forceinline__ void sum_half(float (&sum)[2], uint4 (&ring)[kDepth], const Nf4Gemv& p, const Shared& s,
                                         const uint32_t (&b)[8], const float (&scale)[4], const uint8_t* codes,
                                         uint32_t left) {
  const uint32_t lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
  for (int i = 0; i < kDepth; i += 2) {
    float c[2][4] = {};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      multiply_block<T>(c[k], s.table, 4 * lane, ring[i + k], b);
      refill<kOrder>(ring[i + k], p, codes, i + k, left);
    }
    add_pair(sum, scale, c[0], c[1], t == (u0 + i) / 2);
  }
}

// kEqual: in equal shares (gemv_shares.cuh), here and below.
template <Order kOrder, bool kEqual>
__device__ __forceinline__ Item next_item(const Nf4Gemv& p, const Shared& s, Cursor& cursor) {
  if constexpr (kEqual) {
    return next_in_share<kOrder>(p, s, cursor);
  } else {
    cursor.advance<kOrder>(p.chunks, kOrder == Order::kRagged ? s.tiles.range[1] : 0);
    return item_at<kOrder>(p, s.tiles.places[cursor.tile], cursor.chunk);
  }
}

// A fast item in order kRagged whose first blocks are in the ring; on exit `item` and the ring are those of the next
// one.
template <typename T, bool kEqual>
__device__ __forceinline__ void sum_ragged_item(float (&sum)[2], uint4 (&ring)[kDepth], const Nf4Gemv& p,
                                                const Shared& s, const T* x, Cursor& cursor, Item& item) {
  constexpr Order kOrder = Order::kRagged;
  const uint32_t g = threadIdx.x % 32 / 4, blocks = blocks_of<kOrder>(p, cursor.chunk);
  float scale[4];
  decode_scales<kOrder>(scale, p, s.table, s.tiles, cursor.tile, cursor.chunk, item);
  uint32_t b[8];
  x_operand(b, s, x, cursor.chunk * kChunk + min(g, blocks - 1));
  if (g >= blocks) {
#pragma unroll
    for (int k = 0; k < 8; ++k) b[k] = 0;
  }
  if (blocks <= kDepth) {
    item = next_item<kOrder, kEqual>(p, s, cursor);
    sum_half<T, kOrder, 0>(sum, ring, p, s, b, scale, item.codes, left_of<kOrder>(p, item, cursor.chunk));
    return;
  }
  sum_half<T, kOrder, 0>(sum, ring, p, s, b, scale, item.codes + kDepth * block_stride<kOrder>(), blocks - kDepth);
  item = next_item<kOrder, kEqual>(p, s, cursor);
  sum_half<T, kOrder, kDepth>(sum, ring, p, s, b, scale, item.codes, left_of<kOrder>(p, item, cursor.chunk));
}

// All items of a block: partial sums to shared memory. `item` is the one at the cursor, the ring holds its first half.
template <typename T, Order kOrder, bool kEqual>
__device__ __forceinline__ void sum_group(const Nf4Gemv& p, const Shared& s, const T* x, Cursor cursor, Item item,
                                          uint4 (&ring)[kDepth]) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float* partial = s.partial + threadIdx.x / 32 * kTile + g;
  uint32_t at = kEqual ? (cursor.tile * p.chunks + cursor.chunk) * kTile + g : 0;  // in s.partial
#pragma unroll 1
  for (; item.place.word != kNowhere.word; partial += kWarps * kTile) {
    if (kOrder == Order::kRagged) partial = s.partial + (cursor.tile * p.chunks + cursor.chunk) * kTile + g;
    if (kOrder == Order::kRagged && kEqual) at = (cursor.tile * p.chunks + cursor.chunk) * kTile + g;
    float sum[2] = {};
    if (item.quick) {
      if constexpr (kOrder == Order::kRagged) {
        sum_ragged_item<T, kEqual>(sum, ring, p, s, x, cursor, item);
      } else {
        float scale[4];
        decode_scales<kOrder>(scale, p, s.table, s.tiles, cursor.tile, cursor.chunk, item);
        uint32_t b[8];
        x_operand(b, s, x, cursor.chunk * kChunk + g);
        sum_half<T, kOrder, 0>(sum, ring, p, s, b, scale, item.codes + kDepth * block_stride<kOrder>(), kDepth);
        item = next_item<kOrder, kEqual>(p, s, cursor);
        sum_half<T, kOrder, kDepth>(sum, ring, p, s, b, scale, item.codes, item.quick);
      }
    } else {
      sum_short_item(sum, p, s, x, cursor);
      item = next_item<kOrder, kEqual>(p, s, cursor);
      load_ring<kOrder>(ring, p, item, cursor.chunk);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
      sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
    }
    if constexpr (kEqual) {
      if (t == 0) store_sums(s, at, sum);
      at += kWarps * kTile;
    } else {
      if (t == 0) partial[0] = sum[0], partial[8] = sum[1];
    }
  }
}

// Prefetches the first items of the warp to L2: memory is busy while the table is filled and x is awaited.
template <Order kOrder>
__device__ __forceinline__ void prefetch_items(const Nf4Gemv& p, uint32_t unit, uint32_t tiles, Cursor cursor) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll 1
  for (int i = 0; i < kPrefetch && cursor.tile < tiles; ++i, cursor.advance<kOrder>(p.chunks, tiles)) {
    const TilePlace place = place_of(p, unit + cursor.tile / p.parts, cursor.tile % p.parts);
    const Nf4Segment& w = p.segment[place.segment()];
    if (!is_full(w, place.tile()) || (cursor.chunk + 1) * kChunk > p.blocks) continue;
    const uint64_t first = uint64_t(cursor.chunk) * kChunk;
    constexpr bool kTiled = kOrder != Order::kRowWise;
    const uint64_t block = kTiled ? (uint64_t(place.tile()) * p.blocks + first) * kTile
                                  : uint64_t(place.tile() * kTile + lane / 2) * p.blocks + first;
    const uint8_t* line = w.codes + block * (kBlock / 2) + (kTiled ? lane : lane % 2) * 128;
    prefetch(line);
  }
}

__device__ __forceinline__ float sum_chunks(const float* partial, uint32_t chunks) {
  float sum = 0.f;
#pragma unroll 8
  for (uint32_t c = 0; c < chunks; ++c) sum += partial[c * kTile];
  return sum;
}

template <typename T>
__device__ __forceinline__ void write_group(const Nf4Gemv& p, const Shared& s, uint32_t tiles, void* y,
                                            uint32_t first = 0) {
#pragma unroll 1
  for (uint32_t i = first * kTile + threadIdx.x; i < tiles / p.parts * kTile; i += kThreads) {
    const uint32_t tile = i / kTile * p.parts, r = i % kTile;
    const TilePlace place = s.tiles.places[tile];
    const uint32_t o = place.tile() * kTile + r;
    if (o >= p.segment[place.segment()].out) continue;
    const float* partial = s.partial + tile * p.chunks * kTile + r;
    const float sum = sum_chunks(partial, p.chunks);
    const float second = p.parts == 2 ? sum_chunks(partial + p.chunks * kTile, p.chunks) : 0.f;
    write_result<T>(p, place, o, 0, sum, second, y);
  }
}

template <typename T, Order kOrder>
__global__ void __launch_bounds__(kThreads, 1)
    nf4_gemv_kernel(const __grid_constant__ Nf4Gemv p, const __grid_constant__ Layout layout, const T* x, void* y) {
  LOCALQ_DYNAMIC_MEMORY(memory);
  const Shared s = carve(memory, layout, p.blocks);
  const uint32_t unit = uint64_t(p.units) * blockIdx.x / gridDim.x;
  const uint32_t tiles = (uint32_t(uint64_t(p.units) * (blockIdx.x + 1) / gridDim.x) - unit) * p.parts;
  const Cursor first = first_of<kOrder>(threadIdx.x / 32, p.chunks, tiles);
  TilePlace place = kNowhere;
  if (first.tile < tiles) place = place_of(p, unit + first.tile / p.parts, first.tile % p.parts);
  const Item item = item_at<kOrder>(p, place, first.chunk);
  uint4 ring[kDepth];
  load_ring<kOrder>(ring, p, item, first.chunk);
  float nested = 0.f;
  if (threadIdx.x < tiles * s.tiles.stride) nested = nested_at(place, p, s.tiles.stride, unit, threadIdx.x);
  prefetch_items<kOrder>(p, unit, tiles, first);
  fill_table<T>(s.table, p.code_map, p.nested_map);
  fill_tiles(s.tiles, p, unit, tiles, nested, place);
  dependency_wait();
  release_dependents();
  if (s.x != nullptr) stage(p, s, x);
  __syncthreads();
  sum_group<T, kOrder, false>(p, s, x, first, item, ring);
  __syncthreads();
  write_group<T>(p, s, tiles, y);
}

template <typename T, Order kOrder>
__global__ void __launch_bounds__(kThreads, 1)
    nf4_gemv_shares_kernel(const __grid_constant__ Nf4Gemv p, const __grid_constant__ Layout layout,
                           const __grid_constant__ Shares shares, const T* x, void* y) {
  LOCALQ_DYNAMIC_MEMORY(memory);
  const Shared s = carve<sizeof(Bounds)>(memory, layout, p.blocks);
  const Share own = share_of(shares);
  const Bounds bounds = bounds_of(shares, own, p.chunks);
  const uint32_t tiles = own.units * p.parts;
  bool inside;
  const Cursor first = first_of<kOrder>(shares, own, bounds, threadIdx.x / 32, p.chunks, inside);
  TilePlace place = kNowhere;
  if (inside) place = place_of(p, own.first + first.tile / p.parts, first.tile % p.parts);
  const Item item = item_at<kOrder>(p, place, first.chunk);
  uint4 ring[kDepth];
  load_ring<kOrder>(ring, p, item, first.chunk);
  float nested = 0.f;
  if (threadIdx.x < tiles * s.tiles.stride) nested = nested_at(place, p, s.tiles.stride, own.first, threadIdx.x);
  prefetch_items<kOrder>(p, own.first, inside ? tiles : 0, first);
  fill_table<T>(s.table, p.code_map, p.nested_map);
  fill_tiles(s.tiles, p, own.first, tiles, nested, place);
  if (threadIdx.x == 0) store(bounds, s);
  dependency_wait();
  release_dependents();
  if (s.x != nullptr) stage(p, s, x);
  __syncthreads();
  sum_group<T, kOrder, true>(p, s, x, first, item, ring);
  collect(s);
  __syncthreads();
  write_group<T>(p, s, s.tiles.range[1], y, bounds_in(s).left != 0);
}

constexpr const char* kOp = "nf4_gemv";

// Items by which the longest share must get shorter for blocks to join: what the join takes on an H200 (README.md).
// Where a unit is spread over several blocks, they all end at once and wait for a trip through L2.
constexpr uint32_t kWorth = 2, kWorthSpread = 8;

uint32_t inverse_of(uint32_t d) {
  return uint32_t(((uint64_t(1) << 32) + d - 1) / d);
}

// Equal shares on `blocks` blocks, or none (`each` = 0): where they gain too little over blocks with at most `units`
// units, or the workspace is too small.
Shares shares_of(const Nf4Gemv& p, const Workspace& workspace, uint32_t units, uint32_t blocks) {
  const uint32_t unit = p.parts * p.chunks;
  const uint64_t items = uint64_t(p.units) * unit;
  if (p.chunks < 2 || items < blocks || items * kTile > uint64_t(workspace.words)) return Shares{};
  if ((items + unit) * unit >> 32 != 0) return Shares{};  // inverses would be inexact
  const uint32_t each = uint32_t(items / blocks), more = uint32_t(items % blocks);
  if (each + (more != 0) + (p.units < blocks ? kWorthSpread : kWorth) > units * unit) return Shares{};
  return {each, more, unit, inverse_of(unit), inverse_of(p.chunks), workspace.meeting};
}

// The most units that a share has items of.
uint32_t units_of(const Shares& shares) {
  return (shares.each + (shares.more != 0) + shares.unit - 2) / shares.unit + 1;
}

// Launches equal shares where they gain, which needs room for the sums of a block and all blocks to run at once.
template <typename T>
bool launch_shares(const Nf4Gemv& p, Layout layout, uint32_t units, const Workspace& workspace, const T* x, void* y,
                   int device, cudaStream_t stream) {
  const DeviceFacts& facts = device_facts(device, kOp);
  const Shares shares = shares_of(p, workspace, units, facts.multiprocessors);
  if (shares.each == 0) return false;
  layout.tiles = units_of(shares) * p.parts;
  const uint32_t bytes = layout.bytes(p.blocks, p.chunks) + sizeof(Bounds);
  if (bytes > uint32_t(facts.shared_bytes_per_block)) return false;
  auto* kernel =
      p.blocks % kChunk == 0 ? nf4_gemv_shares_kernel<T, Order::kTiled> : nf4_gemv_shares_kernel<T, Order::kRagged>;
  launch(kOp, device, kernel, facts.multiprocessors, kThreads, bytes, stream, p, layout, shares, x, y);
  return true;
}

template <typename T>
void launch_typed(const Nf4Gemv& p, const Workspace& workspace, const T* x, void* y, bool tiled, int device,
                  cudaStream_t stream) {
  const DeviceFacts& facts = device_facts(device, kOp);
  const uint32_t budget = facts.shared_bytes_per_block;
  Layout layout = {p.parts, (p.blocks + 1) / 2 * 256};
  if (layout.bytes(p.blocks, p.chunks) > budget && p.extras.norm == NormKind::kNone) layout.x_bytes = 0;
  const uint32_t smallest = layout.bytes(p.blocks, p.chunks);
  require(smallest <= budget, kOp, "in", p.blocks * kBlock, "is too large for the shared memory of this device");
  layout.tiles += 1;
  const uint32_t per_tile = layout.bytes(p.blocks, p.chunks) - smallest;
  const uint32_t fit = (budget - smallest) / per_tile / p.parts + 1;  // units per block
  const uint32_t sms = facts.multiprocessors, waves = (p.units + sms * fit - 1) / (sms * fit);
  const uint32_t grid = p.units < sms * waves ? p.units : sms * waves, units = (p.units + grid - 1) / grid;
  if (tiled && waves == 1 && launch_shares(p, layout, units, workspace, x, y, device, stream)) return;
  layout.tiles = units * p.parts;
  auto* kernel = nf4_gemv_kernel<T, Order::kRowWise>;
  if (tiled) kernel = p.blocks % kChunk == 0 ? nf4_gemv_kernel<T, Order::kTiled> : nf4_gemv_kernel<T, Order::kRagged>;
  launch(kOp, device, kernel, grid, kThreads, layout.bytes(p.blocks, p.chunks), stream, p, layout, x, y);
}

}  // namespace

void nf4_gemv_row(const Nf4Gemv& p, const Workspace& workspace, const void* x, void* y, Type type, bool tiled,
                  int device, cudaStream_t stream) {
  if (type == Type::kFloat16) {
    return launch_typed(p, workspace, static_cast<const __half*>(x), y, tiled, device, stream);
  }
  launch_typed(p, workspace, static_cast<const __nv_bfloat16*>(x), y, tiled, device, stream);
}

}  // namespace localq
