// y = extras(x W^T) for 2 to 8 rows of x, W stored as NF4 (nf4.cuh) in either order, up to three matrices that share x;
// x, bias and residual in f16 or bf16, sums in f32, rounded once. Deterministic: every sum has one order.
//
// As nf4_gemv.cu, but column c of the product's B is row c of x, so every product counts in full and x is needed anew
// for every block of 64 columns. To need it half as often a warp works on two tiles of 16 results at a time. `split`
// warps share such a pair, each takes every split-th chunk of 8 blocks, and their sums meet in shared memory.
//
// A block of a tile costs 16 PRMT, 16 look-ups, 4 products, 4 FFMA and 2 shuffles, which bring the scales from the lane
// that decoded them; for two tiles 2 loads of x come to it, from shared memory where all rows fit.
// Bound: memory. Reads out*in*(1/2 + 1/64 + 4/16384) bytes once.
#include "nf4_gemv.h"

namespace localq {
namespace {

constexpr int kWarps = 16, kThreads = 32 * kWarps;
constexpr int kRows = 8;     // of x, the width of the product
constexpr int kPair = 2;     // tiles that a warp works on
constexpr int kDepth = 2;    // blocks of each tile in flight
constexpr int kRowPad = 64;  // bytes between rows of x in shared memory, so that two rows fill all banks

struct Shared {
  uint8_t* table;
  float* partial;  // [kWarps][kPair][kTile][kRows]
  uint8_t* x;      // [rows][in] of T and kRowPad, or null
};
constexpr uint32_t kFixedBytes = kTableBytes + 4 * kWarps * kPair * kTile * kRows;

// What a warp works on: two tiles, of which the second may be the first again (`single`), and its columns.
struct Pair {
  TilePlace place[kPair];
  bool single, quick;  // quick: both tiles are whole
};

__device__ __forceinline__ Pair pair_at(const Nf4Gemv& p, uint32_t index) {
  Pair pair;
  const uint32_t unit = p.parts == 2 ? index : index * kPair;
  pair.single = p.parts == 1 && unit + 1 == p.units;
  pair.place[0] = place_of(p, unit, 0);
  pair.place[1] = p.parts == 2 ? place_of(p, unit, 1) : pair.single ? pair.place[0] : place_of(p, unit + 1, 0);
  pair.quick = true;
#pragma unroll
  for (int j = 0; j < kPair; ++j) {
    pair.quick = pair.quick && is_full(p.segment[pair.place[j].segment()], pair.place[j].tile());
  }
  return pair;
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

  // volatile keeps x of later blocks from being loaded before it is needed, for which there are no registers
  __device__ __forceinline__ void load(uint32_t (&b)[8], uint32_t block) const {
    const uint4* low = words + block * 8;
    asm volatile("ld.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "l"(low));
    asm volatile("ld.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(b[4]), "=r"(b[5]), "=r"(b[6]), "=r"(b[7]) : "l"(low + second));
  }
};

template <typename T>
__device__ __forceinline__ XSource x_source(const Shared& s, const T* x, int rows, uint32_t blocks) {
  const uint32_t lane = threadIdx.x % 32, t = lane % 4, row = min(lane / 4, rows - 1), words = blocks * 8;
  if (s.x != nullptr) return {reinterpret_cast<const uint4*>(s.x + row * (words * 16 + kRowPad)) + t, 4};
  return {reinterpret_cast<const uint4*>(x) + row * words + 2 * t, 1};
}

// Codes of blocks first .. first + kDepth - 1 of both tiles.
template <bool kTiled>
__device__ __forceinline__ uint4 load_block(const Nf4Gemv& p, TilePlace place, uint32_t block) {
  const uint32_t lane = threadIdx.x % 32;
  const Nf4Segment& w = p.segment[place.segment()];
  if (kTiled) {
    return __ldcs(reinterpret_cast<const uint4*>(w.codes) + (uint64_t(place.tile()) * p.blocks + block) * kTileWords +
                  lane);
  }
  const auto* low = reinterpret_cast<const uint2*>(w.codes) +
                    (uint64_t(place.tile() * kTile + lane / 4) * p.blocks + block) * 4 + lane % 4;
  const uint2 a = __ldcs(low), b = __ldcs(low + uint64_t(8) * p.blocks * 4);
  return make_uint4(a.x, a.y, b.x, b.y);
}

template <bool kTiled>
__device__ __forceinline__ void load_ring(uint4 (&ring)[kDepth][kPair], const Nf4Gemv& p, const Pair& pair,
                                          uint32_t block) {
#pragma unroll
  for (int i = 0; i < kDepth; ++i) {
#pragma unroll
    for (int j = 0; j < kPair; ++j) ring[i][j] = load_block<kTiled>(p, pair.place[j], block + i);
  }
}

// Blocks first + u0 .. of a whole chunk of whole tiles: sum += scale * product. Refills the ring from `next` on.
template <typename T, bool kTiled>
__device__ __forceinline__ void sum_part(float (&sum)[kPair][4], uint4 (&ring)[kDepth][kPair], const Nf4Gemv& p,
                                         const Shared& s, const XSource& x, const Pair& pair,
                                         const float (&scale)[kPair][4], uint32_t first, int u0, uint32_t next,
                                         bool more) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kDepth; ++i) {
    const int owner = lane / 4 * 4 + (u0 + i) / 2;  // of the scales of this block
    uint32_t b[8];
    x.load(b, first + u0 + i);
#pragma unroll
    for (int j = 0; j < kPair; ++j) {
      float c[4] = {};
      multiply_block<T>(c, s.table, 4 * lane, ring[i][j], b);
      if (more) ring[i][j] = load_block<kTiled>(p, pair.place[j], next + i);
      const float low = __shfl_sync(~0u, scale[j][i % 2], owner);
      const float high = __shfl_sync(~0u, scale[j][2 + i % 2], owner);
      sum[j][0] += low * c[0], sum[j][1] += low * c[1];
      sum[j][2] += high * c[2], sum[j][3] += high * c[3];
    }
  }
}

// Any chunk of any tiles, block by block.
template <typename T>
__device__ __forceinline__ void sum_slowly(float (&sum)[kPair][4], const Nf4Gemv& p, const Shared& s, const XSource& x,
                                           const Pair& pair, uint32_t first) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4;
  const uint32_t end = min(first + kChunk, p.blocks);
#pragma unroll 1
  for (uint32_t block = first; block < end; ++block) {
    uint32_t b[8];
    x.load(b, block);
#pragma unroll
    for (int j = 0; j < kPair; ++j) {
      const Nf4Segment& w = p.segment[pair.place[j].segment()];
      const uint32_t tile = pair.place[j].tile();
      const float low = load_scale(p, w, tile, g, block), high = load_scale(p, w, tile, g + 8, block);
      float c[4] = {};
      multiply_block<T>(c, s.table, 4 * lane, load_codes(w, tile, block, p.blocks), b);
      sum[j][0] += low * c[0], sum[j][1] += low * c[1];
      sum[j][2] += high * c[2], sum[j][3] += high * c[3];
    }
  }
}

// The scales that the lane decodes: rows g and g + 8, blocks 2 t and 2 t + 1 of a whole chunk of whole tiles.
template <bool kTiled>
__device__ __forceinline__ void load_scales(float (&scale)[kPair][4], const Nf4Gemv& p, const Shared& s,
                                            const Pair& pair, uint32_t first) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int j = 0; j < kPair; ++j) {
    const uint32_t tile = pair.place[j].tile();
    const Nf4Segment& w = p.segment[pair.place[j].segment()];
    if (p.nested_map == nullptr) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scale[j][i] = load_scale(p, w, tile, g + i / 2 * 8, first + 2 * t + i % 2);
      continue;
    }
    const uint32_t codes = load_absmax_word<kTiled>(p, w, tile, first);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t flat = (tile * kTile + g + i / 2 * 8) * p.blocks + first + 2 * t + i % 2;
      const float absmax = __uint_as_float(look_up(s.table, 4 * lane + 128, codes, i));
      scale[j][i] = __fadd_rn(__fmul_rn(absmax, w.nested_absmax[flat / kNestedBlock]), w.offset);
    }
  }
}

// The chunks of a pair that are quick: all that are whole, of whole tiles.
__device__ __forceinline__ uint32_t quick_chunks(const Nf4Gemv& p, const Pair& pair) {
  return pair.quick ? p.blocks / kChunk : 0;
}

// All chunks of a warp's share of a pair; the ring holds the first blocks of the first one if that is quick.
template <typename T, bool kTiled>
__device__ __forceinline__ void sum_pair(float (&sum)[kPair][4], uint4 (&ring)[kDepth][kPair], const Nf4Gemv& p,
                                         const Shared& s, const XSource& x, const Pair& pair, uint32_t part,
                                         uint32_t split) {
  const uint32_t whole = quick_chunks(p, pair);
#pragma unroll 1
  for (uint32_t chunk = part; chunk < p.chunks; chunk += split) {
    const uint32_t first = chunk * kChunk, next = first + split * kChunk;
    if (chunk >= whole) {
      sum_slowly<T>(sum, p, s, x, pair, first);
      continue;
    }
    float scale[kPair][4];
    load_scales<kTiled>(scale, p, s, pair, first);
#pragma unroll 1
    for (int u = 0; u < kChunk; u += kDepth) {
      const bool last = u + kDepth == kChunk;
      sum_part<T, kTiled>(sum, ring, p, s, x, pair, scale, first, u, last ? next : first + u + kDepth,
                          !last || chunk + split < whole);
    }
  }
}

// Adds the shares of every pair in order and writes its results.
template <typename T>
__device__ __forceinline__ void write_pairs(const Nf4Gemv& p, const Shared& s, uint32_t first, uint32_t count,
                                            uint32_t split, int rows, void* y) {
  const uint32_t tiles = p.parts == 2 ? 1 : kPair;  // of a pair that have results
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < count * tiles * kTile * rows; i += kThreads) {
    const uint32_t r = i % kTile, row = i / kTile % rows, j = i / (kTile * rows) % tiles,
                   n = i / (kTile * rows * tiles);
    const Pair pair = pair_at(p, first + n);
    const TilePlace place = j == 0 ? pair.place[0] : pair.place[1];
    const uint32_t o = place.tile() * kTile + r;
    if ((j == 1 && pair.single) || o >= p.segment[place.segment()].out) continue;
    float sum = 0.f, second = 0.f;
#pragma unroll 1
    for (uint32_t k = 0; k < split; ++k) {
      const float* partial = s.partial + (((n * split + k) * kPair + j) * kTile + r) * kRows + row;
      sum += partial[0];
      if (p.parts == 2) second += partial[kTile * kRows];
    }
    write_result<T>(p, place, o, row, sum, second, y);
  }
}

template <typename T, bool kTiled>
__global__ void __launch_bounds__(kThreads, 1)
    nf4_gemv_rows_kernel(const __grid_constant__ Nf4Gemv p, const T* x, void* y, int rows, uint32_t pairs,
                         uint32_t split, bool staged) {
  extern __shared__ __align__(16) uint8_t memory[];
  const Shared s = {memory, reinterpret_cast<float*>(memory + kTableBytes), staged ? memory + kFixedBytes : nullptr};
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t together = kWarps / split, part = warp % split;
  const uint32_t begin = uint64_t(pairs) * blockIdx.x / gridDim.x, end = uint64_t(pairs) * (blockIdx.x + 1) / gridDim.x;
  uint32_t own = begin + warp / split;
  Pair pair = pair_at(p, min(own, end - 1));
  uint4 ring[kDepth][kPair] = {};
  if (own < end && part < quick_chunks(p, pair)) load_ring<kTiled>(ring, p, pair, part * kChunk);
  fill_table<T>(s.table, p.code_map, p.nested_map);
  dependency_wait();
  release_dependents();
  if (staged) stage(s, x, rows, p.blocks);
  __syncthreads();
  const XSource source = x_source(s, x, rows, p.blocks);
#pragma unroll 1
  for (uint32_t first = begin; first < end; first += together, own += together) {
    float sum[kPair][4] = {};
    if (own < end) {
      if (first != begin) {
        pair = pair_at(p, own);
        if (part < quick_chunks(p, pair)) load_ring<kTiled>(ring, p, pair, part * kChunk);
      }
      sum_pair<T, kTiled>(sum, ring, p, s, source, pair, part, split);
    }
#pragma unroll
    for (int j = 0; j < kPair; ++j) {
      auto* partial = reinterpret_cast<float2*>(s.partial + ((warp * kPair + j) * kTile + g) * kRows) + t;
      partial[0] = make_float2(sum[j][0], sum[j][1]);
      partial[8 * kRows / 2] = make_float2(sum[j][2], sum[j][3]);
    }
    __syncthreads();
    write_pairs<T>(p, s, first, min(together, end - first), split, rows, y);
    __syncthreads();
  }
}

template <typename T>
void launch_typed(const Nf4Gemv& p, const void* x, void* y, int rows, bool tiled, int device, cudaStream_t stream) {
  constexpr const char* op = "nf4_gemv";
  const DeviceFacts& facts = device_facts(device, op);
  require(int(kFixedBytes) <= facts.shared_bytes_per_block, op, "rows", rows, "needs more shared memory than there is");
  const uint32_t pairs = p.parts == 2 ? p.units : (p.units + 1) / 2, sms = facts.multiprocessors;
  const uint32_t grid = pairs < sms ? pairs : sms, each = (pairs + grid - 1) / grid;
  uint32_t split = 1;  // warps per pair: as many as leave no warp idle, and each a chunk
  while (split < kWarps && 2 * split * each <= kWarps && 2 * split <= p.chunks) split *= 2;
  const uint32_t x_bytes = rows * (p.blocks * kBlock * 2 + kRowPad);
  const bool staged = kFixedBytes + x_bytes <= uint32_t(facts.shared_bytes_per_block);
  auto* kernel = tiled ? nf4_gemv_rows_kernel<T, true> : nf4_gemv_rows_kernel<T, false>;
  launch(op, device, kernel, grid, kThreads, kFixedBytes + (staged ? x_bytes : 0), stream, p, static_cast<const T*>(x),
         y, rows, pairs, split, staged);
}

}  // namespace

void nf4_gemv_rows(const Nf4Gemv& p, const void* x, void* y, Type type, int rows, int device, cudaStream_t stream) {
  const bool tiled = p.segment[0].tiled;
  if (type == Type::kFloat16) return launch_typed<__half>(p, x, y, rows, tiled, device, stream);
  launch_typed<__nv_bfloat16>(p, x, y, rows, tiled, device, stream);
}

}  // namespace localq
