// out = rows row_begin .. row_begin + row_count - 1 of a matrix in NF4 as f16, bf16 or f32, row by row, bit for bit as
// bitsandbytes 0.50 gives them; the matrix is stored in either order (nf4.cuh).
//   out_i = round(code_map[code_i] * absmax_{i/64})            product in f32, one rounding to the type of out
// Needs in % 64 == 0, 16-byte aligned codes and out; a slab of a tiled matrix begins at a multiple of 16 rows.
// A thread takes kWords 16-byte words of codes. Row-wise a word is 32 neighbouring weights, in a tiled block 16 of row
// g and 16 of row g + 8, so that a warp writes lines of at least 128 bytes either way. Bound: memory. Moves n * (1/2 +
// 1/64 + 4/16384 + sizeof(T)) bytes; the tables are read from shared memory, the 16-entry one without bank conflicts
// (16 words, 16 banks; equal words are broadcast).
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "check.h"
#include "launch.h"
#include "launchers.h"
#include "nf4.cuh"

namespace localq {
namespace {

constexpr int kThreads = 256;
constexpr int kWords = 2;                   // per thread, all loaded before the first is used
constexpr int kWeights = 32;                // of a word
constexpr uint32_t kTile = 16, kChunk = 8;  // rows of a tile, blocks of a chunk: nf4.cuh

// Eight values of type T, stored as one or two 16-byte words.
template <typename T>
struct alignas(16) Eight {
  T value[8];
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

// One word of codes: where its two halves of 16 weights go, and the row-wise number of their blocks.
struct Place {
  uint64_t out[2];     // first of the 16 weights, counted from the first weight of the slab
  uint32_t flat[2];    // row-wise number of the block
  uint32_t stored[2];  // where its absmax lies
};

__device__ __forceinline__ Place row_wise(uint64_t word, uint32_t row_begin, uint32_t blocks) {
  const uint64_t weight = word * kWeights;  // counted from the first weight of the matrix
  const uint64_t first = weight - uint64_t(row_begin) * blocks * kBlock;
  const uint32_t flat = uint32_t(weight / kBlock);
  return {{first, first + kWeights / 2}, {flat, flat}, {flat, flat}};
}

__device__ __forceinline__ Place tiled(uint64_t word, uint32_t row_begin, uint32_t blocks) {
  const uint32_t lane = word % 32, g = lane / 4, t = lane % 4, number = uint32_t(word / 32);
  const uint32_t tile = number / blocks, block = number % blocks;
  const uint32_t first = block / kChunk * kChunk, n = blocks - first, u = block - first;
  Place place;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint32_t in_tile = g + 8 * h, row = tile * kTile + in_tile;
    const uint32_t whole = (4 * g + u / 2) * 4 + 2 * h + u % 2;
    place.out[h] = (uint64_t(row - row_begin) * blocks + block) * kBlock + 16 * t;
    place.flat[h] = row * blocks + block;
    place.stored[h] = (tile * blocks + first) * kTile + (n >= kChunk ? whole : in_tile * n + u);
  }
  return place;
}

template <bool kNested>
__device__ __forceinline__ StoredAbsmax load_absmax(const Nf4& w, uint32_t stored, uint32_t flat) {
  if constexpr (kNested) return {w.nested_absmax[flat / kNestedBlock], static_cast<const uint8_t*>(w.absmax)[stored]};
  return {static_cast<const float*>(w.absmax)[stored], 0u};
}

// 16 weights of two words of codes, high nibble first, times their scale.
template <typename T>
__device__ __forceinline__ void write_half(T* out, uint32_t low, uint32_t high, float scale, const float* code_map) {
  const uint32_t words[2] = {low, high};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    Eight<T> eight;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint32_t code = (words[i] >> (8 * (k / 2) + (k % 2 ? 0 : 4))) & 15u;
      convert(__fmul_rn(code_map[code], scale), eight.value[k]);
    }
    reinterpret_cast<Eight<T>*>(out)[i] = eight;
  }
}

template <typename T, bool kNested>
__global__ void __launch_bounds__(kThreads)
    nf4_dequantize_kernel(const Nf4 w, T* out, uint32_t row_begin, uint64_t first_word, uint64_t tiled_end,
                          uint64_t end) {
  __shared__ float code_map[kCodes], nested_map[kNestedMapSize];
  const uint64_t first = first_word + uint64_t(blockIdx.x) * kThreads * kWords + threadIdx.x;
  const uint32_t blocks = w.in / kBlock;
  uint4 codes[kWords];
  StoredAbsmax absmax[kWords][2];
  Place place[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const uint64_t word = min(first + i * kThreads, end - 1);  // past the end: read the last one, written by nobody
    codes[i] = __ldcs(reinterpret_cast<const uint4*>(w.codes) + word);
    place[i] = word < tiled_end ? tiled(word, row_begin, blocks) : row_wise(word, row_begin, blocks);
#pragma unroll
    for (int h = 0; h < 2; ++h) absmax[i][h] = load_absmax<kNested>(w, place[i].stored[h], place[i].flat[h]);
  }
  if (threadIdx.x < kCodes) code_map[threadIdx.x] = w.code_map[threadIdx.x];
  if (kNested) nested_map[threadIdx.x] = w.nested_map[threadIdx.x];
  dependency_wait();
  release_dependents();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    if (first + i * kThreads >= end) return;
    const uint4 c = codes[i];
    write_half(out + place[i].out[0], c.x, c.y, decode_absmax<kNested>(absmax[i][0], nested_map, w.offset), code_map);
    write_half(out + place[i].out[1], c.z, c.w, decode_absmax<kNested>(absmax[i][1], nested_map, w.offset), code_map);
  }
}

template <typename T>
void launch_typed(const Nf4& w, void* out, int64_t row_begin, int64_t row_count, int device, cudaStream_t stream) {
  constexpr const char* op = "nf4_dequantize";
  const uint64_t row_words = w.in / kWeights, begin = row_begin * row_words, end = (row_begin + row_count) * row_words;
  const uint64_t tiled_end = w.tiled ? w.out / kTile * kTile * row_words : 0;
  const uint64_t per_block = kThreads * kWords, grid = (end - begin + per_block - 1) / per_block;
  require(grid <= INT32_MAX, op, "out", w.out, "is too large for one launch");
  auto* kernel = w.nested_absmax != nullptr ? nf4_dequantize_kernel<T, true> : nf4_dequantize_kernel<T, false>;
  launch(op, device, kernel, dim3(uint32_t(grid)), dim3(kThreads), 0, stream, w, static_cast<T*>(out),
         uint32_t(row_begin), begin, tiled_end, end);
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
