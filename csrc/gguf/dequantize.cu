// out = rows row_begin .. row_begin + row_count - 1 of a matrix in GGUF blocks as f16, bf16 or f32, row-major, bitwise
// as localq/formats/gguf/codec.py defines them: f32 arithmetic with the roundings of the definition, then one rounding
// to the type of the result. Needs the tiled order (layout.cuh); a slab is whole tiles.
//
// A warp takes 256 columns of a tile, or as many as are left: their tile blocks are copied to shared memory at once. A
// lane writes eight columns of a row, 16 bytes of 16-bit weights, or twice four columns. Bound: memory.
#include "common/launch.h"
#include "common/rounding.cuh"
#include "common/tile_shares.cuh"
#include "gguf/gguf.h"
#include "gguf/intrinsics.cuh"
#include "gguf/iq4_blocks.cuh"
#include "gguf/k_blocks.cuh"

namespace localq {
namespace {

using namespace gguf;

constexpr const char* kOp = "gguf_dequantize";
constexpr int kWarps = 4, kPieceColumns = 256;

struct Arguments {
  const uint8_t* blocks;  // of the first row of the slab
  uint32_t in, pieces;    // columns of a row; pieces of a row
  uint32_t count;         // pieces of the slab
};

template <typename T>
__device__ __forceinline__ void write_four(T* to, const float* from) {
  Run<T, 4> four;
#pragma unroll
  for (int i = 0; i < 4; ++i) round_to(from[i], four.value[i]);
  *reinterpret_cast<Run<T, 4>*>(to) = four;
}

template <class Block, typename T>
__global__ void __launch_bounds__(32 * kWarps) gguf_dequantize_kernel(const Arguments p, T* out) {
  constexpr uint32_t kBlocks = kPieceColumns / Block::kColumns, kBytes = kBlocks * Block::kBytes;
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
  uint8_t* const piece = shared_memory() + warp * kBytes;
  const uint32_t number = blockIdx.x * kWarps + warp, tile = number / p.pieces;
  const uint32_t column = number % p.pieces * kPieceColumns, columns = min(p.in - column, uint32_t(kPieceColumns));
  if (number < p.count) {
    const uint32_t bytes = columns / Block::kColumns * Block::kBytes;
    const uint64_t before = (uint64_t(tile) * p.in + column) / Block::kColumns * Block::kBytes;
    for (uint32_t i = lane * 16; i < bytes; i += 512) copy_async(piece + i, p.blocks + before + i);
  }
  end_copies();
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
    Block::weights(w, piece + run / kRuns * Block::kBytes, run % kRuns);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int four = 0; four < 2; ++four) {
        const uint32_t at = 32 * run + (Block::kSplit ? 16 * four + 4 * t : 8 * t + 4 * four);
        write_four(row + uint64_t(8 * i) * p.in + at, w[i] + 4 * four);
      }
    }
  }
}

template <class Block, typename T>
void launch_typed(const Arguments& p, void* out, int device, cudaStream_t stream) {
  constexpr uint32_t kBytes = kPieceColumns / Block::kColumns * Block::kBytes;
  launch(kOp, device, gguf_dequantize_kernel<Block, T>, dim3((p.count + kWarps - 1) / kWarps), dim3(32 * kWarps),
         kWarps * kBytes, stream, p, static_cast<T*>(out));
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

Launcher launcher_of(GgufType of) {
  switch (of) {
    case GgufType::kQ4_0:
      return launch_block<Q4_0>;
    case GgufType::kQ4_1:
      return launch_block<Q4_1>;
    case GgufType::kQ5_0:
      return launch_block<Q5_0>;
    case GgufType::kQ5_1:
      return launch_block<Q5_1>;
    case GgufType::kQ8_0:
      return launch_block<Q8_0>;
    case GgufType::kQ2_K:
      return launch_block<Q2_K>;
    case GgufType::kQ3_K:
      return launch_block<Q3_K>;
    case GgufType::kQ4_K:
      return launch_block<Q4_K>;
    case GgufType::kQ5_K:
      return launch_block<Q5_K>;
    case GgufType::kQ6_K:
      return launch_block<Q6_K>;
    case GgufType::kIQ4_NL:
      return launch_block<IQ4_NL>;
    case GgufType::kIQ4_XS:
      return launch_block<IQ4_XS>;
  }
  require(false, kOp, "type", static_cast<int>(of), "has no kernel");
  return nullptr;
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
  const Launcher run = launcher_of(of);
  const DeviceGuard guard(device, kOp);
  run(w, out, type, row_begin, row_count, device, stream);
}

}  // namespace localq
