// y = extras(x W^T) for 2 to 8 rows of x, W stored as NF4 (layout.cuh) in either order, up to three matrices that share
// x; x, bias and residual in f16 or bf16, sums in f32, rounded once. Deterministic: every sum has one order.
//
// As gemv.cu, but column c of the product's B is row c of x, so every product counts in full and x is needed anew
// for every block of 64 columns: from shared memory where all rows fit. The chunks of 8 blocks of a block's tiles, in
// the order of memory, are dealt out evenly: a warp takes a run of them, adds as long as the tile is the same, and
// leaves a share of 16 x rows sums per tile it touched, in the slot tile + warp, which no other share can have.
//
// A block of a tile costs 16 PRMT, 16 look-ups, 4 products, 4 FFMA, 2 loads of x and 2 shuffles, which bring the scales
// from the lane that decoded them. Bound: memory. Reads out*in*(1/2 + 1/64 + 4/16384) bytes once.
#include "nf4/gemv_launch.h"
#include "nf4/gemv_pipeline.cuh"

namespace localq {
namespace {

constexpr int kWarps = 16, kThreads = 32 * kWarps;
constexpr int kRowPad = 64;  // bytes between rows of x in shared memory, so that two rows fill all banks

struct Shared {
  uint8_t* table;
  float* shares;  // [tiles + kWarps][kTile][rows]
  uint8_t* x;     // [rows][in] of T and kRowPad, or null
  TileTable tiles;
};

// A block's tiles: those of units unit .. unit + tiles / parts - 1.
struct Work {
  uint32_t unit, tiles, chunks;

  __device__ __forceinline__ uint32_t begin(uint32_t warp) const {
    return tiles * chunks * warp / kWarps;
  }
  __device__ __forceinline__ uint32_t warp_of(uint32_t item) const {
    return ((item + 1) * kWarps - 1) / (tiles * chunks);
  }
};

__device__ __forceinline__ Work work_of(const Nf4Gemv& p) {
  const uint32_t block = blockIdx.x;
  Work work;
  work.unit = uint64_t(p.units) * block / gridDim.x;
  work.tiles = (uint32_t(uint64_t(p.units) * (block + 1) / gridDim.x) - work.unit) * p.parts;
  work.chunks = p.chunks;
  return work;
}

template <typename T>
__device__ __forceinline__ void stage(const Shared& s, const T* x, int rows, uint32_t blocks) {
  const uint32_t words = blocks * 8;  // 16-byte words of a row: [block][half][t], from [block][t][half]
  for (uint32_t i = threadIdx.x; i < rows * words; i += kThreads) {
    const uint32_t row = i / words, word = i % words, to = word / 8 * 8 + word % 2 * 4 + word % 8 / 2;
    reinterpret_cast<uint4*>(s.x + row * (words * 16 + kRowPad))[to] = reinterpret_cast<const uint4*>(x)[i];
  }
}

// Where the lane reads its row of x; rows that are not there read the last one, into columns that nobody looks at.
struct XSource {
  const uint4* words;
  uint32_t second;  // words from the first half of the lane's columns to the second

  __device__ __forceinline__ void load(uint32_t (&b)[8], uint32_t block) const {
    const uint4* low = words + block * 8;
    load_four(b[0], b[1], b[2], b[3], low);
    load_four(b[4], b[5], b[6], b[7], low + second);
  }
};

template <typename T>
__device__ __forceinline__ XSource x_source(const Shared& s, const T* x, int rows, uint32_t blocks) {
  const uint32_t lane = threadIdx.x % 32, t = lane % 4, row = min(lane / 4, uint32_t(rows - 1)), words = blocks * 8;
  if (s.x != nullptr) return {reinterpret_cast<const uint4*>(s.x + row * (words * 16 + kRowPad)) + t, 4};
  return {reinterpret_cast<const uint4*>(x) + row * words + 2 * t, 1};
}

__device__ __forceinline__ void add_scaled(float (&sum)[4], const float (&c)[4], float low, float high) {
  sum[0] += low * c[0], sum[1] += low * c[1];
  sum[2] += high * c[2], sum[3] += high * c[3];
}

// Blocks u0 .. u0 + 3 of a quick item of `blocks`, whose codes are in `ring`; refills it with four blocks from `codes`
// on, of which so many are left.
template <typename T, Order kOrder, int u0>
__device__ __forceinline__ void sum_half(float (&sum)[4], uint4 (&ring)[kDepth], const Nf4Gemv& p, const Shared& s,
                                         const XSource& x, const float (&scale)[4], uint32_t first, uint32_t blocks,
                                         const uint8_t* codes, uint32_t left) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kDepth; ++i) {
    const int u = u0 + i, owner = lane / 4 * 4 + u / 2;
    if (kOrder == Order::kRagged && u >= blocks) {  // there is no x either
      refill<kOrder>(ring[i], p, codes, i, left);
      continue;
    }
    uint32_t b[8];
    x.load(b, first + u);
    float c[4] = {};
    multiply_block<T>(c, s.table, 4 * lane, ring[i], b);
    refill<kOrder>(ring[i], p, codes, i, left);
    add_scaled(sum, c, __shfl_sync(~0u, scale[u % 2], owner), __shfl_sync(~0u, scale[2 + u % 2], owner));
  }
}

// An item that is not quick, block by block.
template <typename T>
__device__ __forceinline__ void sum_short_item(float (&sum)[4], const Nf4Gemv& p, const Shared& s, const XSource& x,
                                               TilePlace place, uint32_t first) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, tile = place.tile();
  const Nf4Segment& w = p.segment[place.segment()];
  const uint32_t end = min(first + kChunk, p.blocks);
#pragma unroll 1
  for (uint32_t block = first; block < end; ++block) {
    uint32_t b[8];
    x.load(b, block);
    float c[4] = {};
    multiply_block<T>(c, s.table, 4 * lane, load_codes(w, tile, block, p.blocks), b);
    add_scaled(sum, c, load_scale(p, w, tile, g, block), load_scale(p, w, tile, g + 8, block));
  }
}

// Leaves the warp's share of a tile: the lane has rows g and g + 8 of it, rows 2 t and 2 t + 1 of x.
__device__ __forceinline__ void leave_share(const Shared& s, const float (&sum)[4], uint32_t slot, int rows) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 2 * t + i % 2;
    if (row < rows) s.shares[(slot * kTile + g + i / 2 * 8) * rows + row] = sum[i];
  }
}

// The warp's run of items; `item` is its first, and the ring holds the first blocks of that.
template <typename T, Order kOrder>
__device__ __forceinline__ void sum_run(const Nf4Gemv& p, const Shared& s, const XSource& x, const Work& work, int rows,
                                        Item item, uint4 (&ring)[kDepth]) {
  const uint32_t warp = threadIdx.x / 32, at = work.begin(warp);
  uint32_t left = work.begin(warp + 1) - at, tile = at / p.chunks, chunk = at % p.chunks;
  float sum[4] = {};
#pragma unroll 1
  while (left != 0) {
    const uint32_t first = chunk * kChunk, slot = tile + threadIdx.x / 32, blocks = blocks_of<kOrder>(p, chunk);
    const bool quick = item.quick, halves = blocks > kDepth;  // two of them, or one
    float scale[4];
    if (quick) {
      decode_scales<kOrder>(scale, p, s.table, s.tiles, tile, chunk, item);
      if (halves) {
        const uint8_t* const codes = item.codes + kDepth * block_stride<kOrder>();
        sum_half<T, kOrder, 0>(sum, ring, p, s, x, scale, first, blocks, codes, blocks - kDepth);
      }
    } else {
      sum_short_item<T>(sum, p, s, x, item.place, first);
    }
    if (++chunk == p.chunks) chunk = 0, ++tile;
    item.quick = false;
    if (--left != 0) item = item_at<kOrder>(p, s.tiles.places[tile], chunk);
    const uint32_t ahead = left_of<kOrder>(p, item, chunk);
    if (quick) {
      if (halves) {
        sum_half<T, kOrder, kDepth>(sum, ring, p, s, x, scale, first, blocks, item.codes, ahead);
      } else {
        sum_half<T, kOrder, 0>(sum, ring, p, s, x, scale, first, blocks, item.codes, ahead);
      }
    } else {
      load_ring<kOrder>(ring, p, item, chunk);
    }
    if (chunk != 0 && left != 0) continue;
    leave_share(s, sum, slot, rows);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = 0.f;
  }
}

// Adds the shares of a tile in the order of their columns.
__device__ __forceinline__ float sum_shares(const Shared& s, const Work& work, uint32_t tile, uint32_t r, int row,
                                            int rows) {
  const uint32_t last = work.warp_of((tile + 1) * work.chunks - 1);
  float sum = 0.f;
  for (uint32_t warp = work.warp_of(tile * work.chunks); warp <= last; ++warp) {
    if (work.begin(warp) == work.begin(warp + 1)) continue;  // more warps than items: this one left nothing
    sum += s.shares[((tile + warp) * kTile + r) * rows + row];
  }
  return sum;
}

template <typename T>
__device__ __forceinline__ void write_tiles(const Nf4Gemv& p, const Shared& s, const Work& work, int rows, void* y) {
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < work.tiles / p.parts * kTile * rows; i += kThreads) {
    const uint32_t r = i % kTile, row = i / kTile % rows, unit = i / (kTile * rows), tile = unit * p.parts;
    const TilePlace place = place_of(p, work.unit + unit, 0);
    const uint32_t o = place.tile() * kTile + r;
    if (o >= p.segment[place.segment()].out) continue;
    const float sum = sum_shares(s, work, tile, r, row, rows);
    const float second = p.parts == 2 ? sum_shares(s, work, tile + 1, r, row, rows) : 0.f;
    write_result<T>(p, place, o, row, sum, second, y);
  }
}

template <typename T, Order kOrder>
__global__ void __launch_bounds__(kThreads, 1)
    nf4_gemv_rows_kernel(const __grid_constant__ Nf4Gemv p, const T* x, void* y, int rows, uint32_t most_tiles,
                         uint32_t share_bytes, bool staged) {
  LOCALQ_DYNAMIC_MEMORY(memory);
  uint8_t* const rest = memory + kTableBytes;
  const Work work = work_of(p);
  const uint32_t warp = threadIdx.x / 32, at = work.begin(warp), tile = at / p.chunks;
  uint8_t* const after_shares = rest + share_bytes;
  const uint32_t table_bytes = TileTable::bytes(most_tiles, p.blocks);
  const Shared s = {memory, reinterpret_cast<float*>(rest),
                    staged ? after_shares + (table_bytes + 15) / 16 * 16 : nullptr,
                    TileTable(after_shares, most_tiles, p.blocks)};
  TilePlace place = {};
  float nested = 0.f;
  if (threadIdx.x < work.tiles * s.tiles.stride) {
    nested = nested_at(place, p, s.tiles.stride, work.unit, threadIdx.x);
  }
  Item item = {};
  if (at < work.begin(warp + 1)) {
    item = item_at<kOrder>(p, place_of(p, work.unit + tile / p.parts, tile % p.parts), at % p.chunks);
  }
  uint4 ring[kDepth];
  load_ring<kOrder>(ring, p, item, at % p.chunks);
  fill_table<T>(s.table, p.code_map, p.nested_map);
  fill_tiles(s.tiles, p, work.unit, work.tiles, nested, place);
  dependency_wait();
  release_dependents();
  if (staged) stage(s, x, rows, p.blocks);
  __syncthreads();
  sum_run<T, kOrder>(p, s, x_source(s, x, rows, p.blocks), work, rows, item, ring);
  __syncthreads();
  // From shared memory, because there were no registers to keep it in through the products.
  write_tiles<T>(p, s, {s.tiles.range[0], s.tiles.range[1], p.chunks}, rows, y);
}

template <typename T>
void launch_typed(const Nf4Gemv& p, const void* x, void* y, int rows, bool tiled, int device, cudaStream_t stream) {
  constexpr const char* op = "nf4_gemv";
  const DeviceFacts& facts = device_facts(device, op);
  const uint32_t budget = facts.shared_bytes_per_block - kTableBytes, share = 4 * kTile * rows;
  const uint32_t none = TileTable::bytes(0, p.blocks) + kWarps * share;
  const uint32_t per_tile = TileTable::bytes(1, p.blocks) - TileTable::bytes(0, p.blocks) + share;
  const uint32_t fit = (budget - none) / per_tile / p.parts;  // units of a block
  require(fit > 0, op, "in", p.blocks * kBlock, "is too large for the shared memory of this device");
  const uint32_t sms = facts.multiprocessors, waves = (p.units + sms * fit - 1) / (sms * fit);
  const uint32_t grid = p.units < sms * waves ? p.units : sms * waves;
  const uint32_t tiles = (p.units + grid - 1) / grid * p.parts, share_bytes = (tiles + kWarps) * share;
  const uint32_t table_bytes = (TileTable::bytes(tiles, p.blocks) + 15) / 16 * 16;
  const uint32_t x_bytes = rows * (p.blocks * kBlock * 2 + kRowPad);
  const bool staged = share_bytes + table_bytes + x_bytes <= budget;
  auto* kernel = nf4_gemv_rows_kernel<T, Order::kRowWise>;
  if (tiled) {
    kernel = p.blocks % kChunk == 0 ? nf4_gemv_rows_kernel<T, Order::kTiled> : nf4_gemv_rows_kernel<T, Order::kRagged>;
  }
  launch(op, device, kernel, grid, kThreads, kTableBytes + share_bytes + table_bytes + (staged ? x_bytes : 0), stream,
         p, static_cast<const T*>(x), y, rows, tiles, share_bytes, staged);
}

}  // namespace

void nf4_gemv_rows(const Nf4Gemv& p, const void* x, void* y, Type type, int rows, int device, cudaStream_t stream) {
  const bool tiled = p.segment[0].tiled;
  if (type == Type::kFloat16) return launch_typed<__half>(p, x, y, rows, tiled, device, stream);
  launch_typed<__nv_bfloat16>(p, x, y, rows, tiled, device, stream);
}

}  // namespace localq
