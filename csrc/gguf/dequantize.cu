// out = rows row_begin .. row_begin + row_count - 1 of a matrix in GGUF blocks as f16, bf16 or f32, row-major, bitwise
// as localq/formats/gguf/codec.py defines them: f32 arithmetic with the roundings of the definition, then one rounding
// to the type of the result. Needs the tiled order (layout.cuh); a slab is whole tiles.
//
// A warp takes 256 columns of a tile, or as many as are left: their tile blocks are copied to shared memory at once. A
// lane writes eight columns of a row, 16 bytes of 16-bit weights, or twice four columns. Bound: memory.
#include <type_traits>

#include "common/async_copies.cuh"
#include "common/launch.h"
#include "common/rounding.cuh"
#include "common/tile_shares.cuh"
#include "gguf/block_types.h"

namespace localq {
namespace {

using namespace gguf;

constexpr const char* kOp = "gguf_dequantize";
constexpr int kWarps = 4, kPieceColumns = 256;

struct Arguments {
  const uint8_t* blocks;  // of the first row of the slab
  uint32_t in, pieces;    // columns of a row; pieces of a row
  uint32_t count;         // pieces of the slab
  float factor;           // of block types that have one
};

// Four bytes of values rounded to T, from `from` on.
template <typename T>
__device__ __forceinline__ uint32_t rounded_word(const float* from) {
  if constexpr (sizeof(T) == 4) {
    return as<uint32_t>(from[0]);
  } else {
    T low, high;
    round_to(from[0], low), round_to(from[1], high);
    return as<uint16_t>(low) | uint32_t(as<uint16_t>(high)) << 16;
  }
}

// kCount values, 8 or 16 bytes at a time. Assignments become stores of 2 and 4 bytes, which took twice
// as long.
template <int kCount, typename T>
__device__ __forceinline__ void write(T* to, const float* from) {
  constexpr int kOfWord = 4 / sizeof(T), kWords = kCount / kOfWord;
  if constexpr (kWords == 2) {
    __stcg(reinterpret_cast<uint2*>(to), make_uint2(rounded_word<T>(from), rounded_word<T>(from + kOfWord)));
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += 4 * kOfWord) {
      __stcg(reinterpret_cast<uint4*>(to + i),
             make_uint4(rounded_word<T>(from + i), rounded_word<T>(from + i + kOfWord),
                        rounded_word<T>(from + i + 2 * kOfWord), rounded_word<T>(from + i + 3 * kOfWord)));
    }
  }
}

// Bytes of the grid that weights of a block type are looked up in; 0 for others.
template <class Block, typename = void>
constexpr uint32_t kGridBytes = 0;
template <class Block>
constexpr uint32_t kGridBytes<Block, std::void_t<decltype(Block::kGridBytes)>> = Block::kGridBytes;

template <class Block, typename T>
__global__ void __launch_bounds__(32 * kWarps) gguf_dequantize_kernel(const Arguments p, T* out) {
  constexpr uint32_t kBlocks = kPieceColumns / Block::kColumns, kBytes = kBlocks * Block::kBytes;
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
  const uint8_t* const grid = shared_memory();
  uint8_t* const piece = shared_memory() + kGridBytes<Block> + warp * kBytes;
  const uint32_t number = blockIdx.x * kWarps + warp, tile = number / p.pieces;
  const uint32_t column = number % p.pieces * kPieceColumns, columns = min(p.in - column, uint32_t(kPieceColumns));
  if (number < p.count) {
    const uint32_t bytes = columns / Block::kColumns * Block::kBytes;
    const uint64_t before = (uint64_t(tile) * p.in + column) / Block::kColumns * Block::kBytes;
    for (uint32_t i = lane * 16; i < bytes; i += 512) copy_async(piece + i, p.blocks + before + i);
  }
  end_copies();
  if constexpr (kGridBytes<Block> != 0) {
    Block::fill_table(shared_memory());
    __syncthreads();
  }
  dependency_wait();
  release_dependents();
  if (number >= p.count) return;
  wait_for_copies<0>();
  __syncwarp();
  T* const row = out + (uint64_t(tile) * kTileRows + g) * p.in + column;
#pragma unroll 1
  for (uint32_t run = 0; run < columns / 32; ++run) {
    float w[2][8];
    constexpr uint32_t kRuns = Block::kColumns / 32;
    if constexpr (kGridBytes<Block> != 0) {
      Block::weights(w, piece + run / kRuns * Block::kBytes, grid, run % kRuns);
    } else {
      Block::weights(w, piece + run / kRuns * Block::kBytes, run % kRuns);
    }
    if constexpr (kHasFactor<Block>) {
#pragma unroll
      for (int i = 0; i < 16; ++i) w[i / 8][i % 8] = __fmul_rn(w[i / 8][i % 8], p.factor);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      T* const to = row + uint64_t(8 * i) * p.in + 32 * run;
      if constexpr (Block::kSplit) {
        write<4>(to + 4 * t, w[i]);
        write<4>(to + 16 + 4 * t, w[i] + 4);
      } else {
        write<8>(to + 8 * t, w[i]);
      }
    }
  }
}

template <class Block, typename T>
void launch_typed(const Arguments& p, void* out, int device, cudaStream_t stream) {
  constexpr uint32_t kBytes = kPieceColumns / Block::kColumns * Block::kBytes;
  launch(kOp, device, gguf_dequantize_kernel<Block, T>, dim3((p.count + kWarps - 1) / kWarps), dim3(32 * kWarps),
         kGridBytes<Block> + kWarps * kBytes, stream, p, static_cast<T*>(out));
}

template <class Block>
void launch_block(const GgufMatrix& w, void* out, Type type, int64_t row_begin, int64_t row_count, int device,
                  cudaStream_t stream) {
  require(w.in > 0 && w.in % Block::kColumns == 0, kOp, "in", w.in, "must be a positive multiple of a block's columns");
  const int64_t pieces = (w.in + kPieceColumns - 1) / kPieceColumns;
  require(w.in <= 1 << 24 && row_count / kTileRows * pieces < 1 << 30, kOp, "out", w.out, "is too large");
  Arguments p = {};
  p.blocks = w.blocks + row_begin / kTileRows * (w.in / Block::kColumns) * Block::kBytes;
  p.in = uint32_t(w.in), p.pieces = uint32_t(pieces), p.count = uint32_t(row_count / kTileRows * pieces);
  p.factor = w.factor;
  switch (type) {
    case Type::kFloat16:
      return launch_typed<Block, __half>(p, out, device, stream);
    case Type::kBFloat16:
      return launch_typed<Block, __nv_bfloat16>(p, out, device, stream);
    case Type::kFloat32:
      return launch_typed<Block, float>(p, out, device, stream);
  }
  require(false, kOp, "dtype", static_cast<int>(type), "must be float16, bfloat16 or float32");
}

using Launcher = void (*)(const GgufMatrix&, void*, Type, int64_t, int64_t, int, cudaStream_t);

Launcher launcher_of(GgufType type) {
  return of_type(type, kOp, [](auto of) { return Launcher(launch_block<typename decltype(of)::Block>); });
}

}  // namespace

void gguf_dequantize(const GgufMatrix& w, GgufType of, void* out, Type type, int64_t row_begin, int64_t row_count,
                     int device, cudaStream_t stream) {
  require(w.out >= kTileRows && w.out % kTileRows == 0, kOp, "out", w.out, "must be a positive multiple of 16");
  const bool cut = row_begin % kTileRows != 0 || row_count % kTileRows != 0;
  require(row_begin >= 0 && row_begin < w.out && !cut, kOp, "row_begin", row_begin,
          "must be a row of the matrix, in whole tiles of 16 rows");
  require(row_count > 0 && row_count <= w.out - row_begin, kOp, "row_count", row_count, "is not within the matrix");
  require_aligned(w.blocks, 16, kOp, "blocks");
  require_aligned(out, 16, kOp, "out");
  require(w.factor == 1.f || of == GgufType::kNVFP4, kOp, "factor", 0, "is not 1: only NVFP4 has one");
  const Launcher run = launcher_of(of);
  const DeviceGuard guard(device, kOp);
  run(w, out, type, row_begin, row_count, device, stream);
}

}  // namespace localq
