// out = rows row_begin .. row_begin + row_count - 1 of a matrix in NF4 as f16, bf16 or f32, row by row, bit for bit as
// bitsandbytes 0.50 gives them; the matrix is stored in either order (layout.cuh).
//   out_i = round(code_map[code_i] * absmax_{i/64})            product in f32, one rounding to the type of out
// Needs in % 64 == 0, 16-byte aligned codes and out; a slab of a tiled matrix begins at a multiple of 16 rows.
//
// A thread takes 4 bytes of codes = 8 neighbouring weights of a row, kUnroll times, all loaded before the first use, so
// that a warp reads 128 contiguous bytes and writes whole sectors: row by row 512 contiguous bytes, of a tile four
// lines of 128. Of a tile, a block of threads takes a chunk of 8 blocks of columns: a thread stays in one row of the
// tile, and the absmax of its four words are one byte each of one 16-byte load. Bound: memory. Moves n * (1/2 + 1/64 +
// 4/16384 + sizeof(T)) bytes; the tables are read from shared memory, the 16-entry one without bank conflicts (16
// words, 16 banks; equal words are broadcast).
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/check.h"
#include "common/launch.h"
#include "nf4/layout.cuh"
#include "nf4/nf4.h"

namespace localq {
namespace {

constexpr int kThreads = 256;
constexpr int kWeights = 8;  // of a word
constexpr int kUnroll = 4;
constexpr uint32_t kTile = 16, kChunk = 8;  // rows of a tile, blocks of a chunk: layout.cuh
static_assert(kThreads * kUnroll * kWeights == kTile * kChunk * kBlock, "a block of threads takes a chunk of a tile");

// Eight values of type T, stored as one or two 16-byte words.
template <typename T>
struct alignas(16) Eight {
  T value[kWeights];
};

__device__ __forceinline__ void convert(float from, __half& to) {
  to = __float2half_rn(from);
}
__device__ __forceinline__ void convert(float from, __nv_bfloat16& to) {
  to = __float2bfloat16_rn(from);
}
__device__ __forceinline__ void convert(float from, float& to) {
  to = from;
}

struct Tables {
  float code_map[kCodes];
  float nested_map[kNestedMapSize];
};

template <bool kNested>
__device__ __forceinline__ void fill(Tables& tables, const Nf4& w) {
  if (threadIdx.x < kCodes) tables.code_map[threadIdx.x] = w.code_map[threadIdx.x];
  if (kNested) tables.nested_map[threadIdx.x] = w.nested_map[threadIdx.x];
  dependency_wait();
  release_dependents();
  __syncthreads();
}

// Eight weights, high nibble of a byte first, times their scale. Streamed: the product that reads them is far away.
template <typename T>
__device__ __forceinline__ void write(T* out, uint32_t word, float scale, const Tables& tables) {
  const auto* values = reinterpret_cast<const uint8_t*>(tables.code_map);
  Eight<T> eight;
#pragma unroll
  for (int k = 0; k < kWeights; ++k) {
    const int shift = 8 * (k / 2) + (k % 2 ? 0 : 4);
    const uint32_t offset = (shift < 2 ? word << (2 - shift) : word >> (shift - 2)) & 0x3cu;
    convert(__fmul_rn(*reinterpret_cast<const float*>(values + offset), scale), eight.value[k]);
  }
  *reinterpret_cast<Eight<T>*>(out) = eight;
}

template <typename T, bool kNested>
__global__ void __launch_bounds__(kThreads) nf4_dequantize_rows_kernel(const Nf4 w, T* out,  // row `first` on
                                                                       int64_t first,        // word of that row
                                                                       int64_t words) {
  __shared__ Tables tables;
  const int64_t begin = int64_t(blockIdx.x) * kThreads * kUnroll + threadIdx.x;
  const auto* codes = reinterpret_cast<const uint32_t*>(w.codes) + first;
  uint32_t word[kUnroll];
  StoredAbsmax absmax[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t i = min(begin + u * kThreads, words - 1);  // past the end: read the last one, written by nobody
    word[u] = __ldcs(codes + i);
    absmax[u] = load_absmax<kNested>(w, (first + i) / (kBlock / kWeights));
  }
  fill<kNested>(tables, w);
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t i = begin + u * kThreads;
    if (i >= words) return;
    write(out + i * kWeights, word[u], decode_absmax<kNested>(absmax[u], tables.nested_map, w.offset), tables);
  }
}

// What a thread of the tiled kernel works on: words at block 2 u + odd of the chunk, always in the same row.
struct Part {
  uint32_t row, column, odd;  // row of the tile; column within a block; which of two neighbouring blocks
  uint32_t g, h;
};

__device__ __forceinline__ Part part_of_thread() {
  const uint32_t e = threadIdx.x % 128, lane = e / 4, h = e / 2 % 2, g = lane / 4;
  return {g + 8 * h, lane % 4 * 16 + e % 2 * 8, threadIdx.x / 128, g, h};
}

template <bool kNested>
__device__ __forceinline__ void load_tile_absmax(StoredAbsmax (&absmax)[kUnroll], const Nf4& w, const Part& part,
                                                 uint32_t tile, uint32_t blocks, uint32_t first, uint32_t n) {
  const uint64_t base = uint64_t(tile * blocks + first) * kTile;
  uint32_t codes[kUnroll] = {};
  if (kNested && n == kChunk) {
    const uint4 all = __ldcs(reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(w.absmax) + base) + part.g);
    codes[0] = all.x, codes[1] = all.y, codes[2] = all.z, codes[3] = all.w;
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const uint32_t b = min(2 * u + part.odd, n - 1), flat = (tile * kTile + part.row) * blocks + first + b;
    const uint32_t whole = (4 * part.g + b / 2) * 4 + 2 * part.h + b % 2;
    const uint64_t at = base + (n == kChunk ? whole : part.row * n + b);
    if (!kNested) {
      absmax[u] = {static_cast<const float*>(w.absmax)[at], 0u};
    } else {
      const uint32_t code =
          n == kChunk ? codes[u] >> (8 * (2 * part.h + part.odd)) & 255u : static_cast<const uint8_t*>(w.absmax)[at];
      absmax[u] = {w.nested_absmax[flat / kNestedBlock], code};
    }
  }
}

template <typename T, bool kNested>
__global__ void __launch_bounds__(kThreads) nf4_dequantize_tiles_kernel(const Nf4 w, T* out,  // of row row_begin on
                                                                        uint32_t first_tile, uint32_t chunks) {
  __shared__ Tables tables;
  const uint32_t blocks = w.in / kBlock, tile = first_tile + blockIdx.x / chunks, first = blockIdx.x % chunks * kChunk;
  const uint32_t n = min(kChunk, blocks - first);
  const Part part = part_of_thread();
  const auto* codes = reinterpret_cast<const uint32_t*>(w.codes) + uint64_t(tile * blocks + first) * 128;
  uint32_t word[kUnroll];
  StoredAbsmax absmax[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) word[u] = __ldcs(codes + min(2 * u + part.odd, n - 1) * 128 + threadIdx.x % 128);
  load_tile_absmax<kNested>(absmax, w, part, tile, blocks, first, n);
  fill<kNested>(tables, w);
  T* row = out + uint64_t((tile - first_tile) * kTile + part.row) * w.in + first * kBlock + part.column;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (2 * u + part.odd >= n) return;
    const float scale = decode_absmax<kNested>(absmax[u], tables.nested_map, w.offset);
    write(row + (2 * u + part.odd) * kBlock, word[u], scale, tables);
  }
}

template <typename T>
void launch_typed(const Nf4& w, void* out, int64_t row_begin, int64_t row_count, int device, cudaStream_t stream) {
  constexpr const char* op = "nf4_dequantize";
  const bool nested = w.nested_absmax != nullptr;
  const int64_t end = row_begin + row_count, whole = w.tiled ? w.out / kTile * kTile : 0;
  const int64_t tiles = row_begin < whole ? ((end < whole ? end : whole) - row_begin) / kTile : 0;
  if (tiles > 0) {
    const int64_t chunks = (w.in / kBlock + kChunk - 1) / kChunk;
    require(tiles * chunks <= INT32_MAX, op, "out", w.out, "is too large for one launch");
    auto* kernel = nested ? nf4_dequantize_tiles_kernel<T, true> : nf4_dequantize_tiles_kernel<T, false>;
    launch(op, device, kernel, dim3(uint32_t(tiles * chunks)), dim3(kThreads), 0, stream, w, static_cast<T*>(out),
           uint32_t(row_begin / kTile), uint32_t(chunks));
  }
  const int64_t first = row_begin + tiles * kTile;  // of the rows that lie row by row
  if (first == end) return;
  const int64_t words = (end - first) * w.in / kWeights,
                blocks = (words + kThreads * kUnroll - 1) / (kThreads * kUnroll);
  require(blocks <= INT32_MAX, op, "out", w.out, "is too large for one launch");
  auto* kernel = nested ? nf4_dequantize_rows_kernel<T, true> : nf4_dequantize_rows_kernel<T, false>;
  launch(op, device, kernel, dim3(uint32_t(blocks)), dim3(kThreads), 0, stream, w,
         static_cast<T*>(out) + (first - row_begin) * w.in, first * w.in / kWeights, words);
}

}  // namespace

void nf4_dequantize(const Nf4& w, void* out, Type type, int64_t row_begin, int64_t row_count, int device,
                    cudaStream_t stream) {
  constexpr const char* op = "nf4_dequantize";
  require(w.in > 0 && w.in % kBlock == 0, op, "in", w.in, "must be a positive multiple of 64");
  require(w.out > 0 && w.out * (w.in / kBlock) < (int64_t(1) << 32), op, "out", w.out,
          "must be positive and not larger");
  require(row_begin >= 0 && row_begin < w.out, op, "row_begin", row_begin, "is not a row of the matrix");
  require(row_count > 0 && row_count <= w.out - row_begin, op, "row_count", row_count, "is not within the matrix");
  const bool to_end = row_begin + row_count == w.out, whole = row_begin % 16 == 0 && (to_end || row_count % 16 == 0);
  require(!w.tiled || whole, op, "row_begin", row_begin, "cuts a tile of 16 rows");
  require_nf4(w, op);
  require_aligned(out, 16, op, "out");
  const DeviceGuard guard(device, op);
  switch (type) {
    case Type::kFloat16:
      return launch_typed<__half>(w, out, row_begin, row_count, device, stream);
    case Type::kBFloat16:
      return launch_typed<__nv_bfloat16>(w, out, row_begin, row_count, device, stream);
    case Type::kFloat32:
      return launch_typed<float>(w, out, row_begin, row_count, device, stream);
  }
  require(false, op, "dtype", static_cast<int>(type), "must be float16, bfloat16 or float32");
}

}  // namespace localq
