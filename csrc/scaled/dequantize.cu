// out = rows row_begin .. row_begin + row_count - 1 of a matrix with scales apart from its codes as f16, bf16 or f32,
// row-major, bitwise as the formats define them: f32 arithmetic, then a rounding to the type of the definition, then
// one to the type of the result. Needs the tiled order (layout.cuh); a slab is whole tiles.
//
// A warp takes 256 columns of a tile, or as many as are left: their codes, scales and zero points are copied to shared
// memory at once. A lane writes eight columns of a row, 16 bytes of 16-bit weights. Bound: memory.
#include "common/check.h"
#include "common/launch.h"
#include "common/rounding.cuh"
#include "scaled/gemv_kernel.cuh"
#include "scaled/scaled.h"

namespace localq {
namespace {

using namespace scaled;

constexpr const char* kOp = "scaled_dequantize";
constexpr int kWarps = 4, kPieceColumns = 256;

struct Slab {
  const uint8_t *codes, *scales, *zeros;  // of the first row of the slab
  const float* factors;                   // of that row
  uint32_t in, pieces;                    // columns of a row; pieces of a row
  uint32_t count;                         // pieces of the slab
  uint32_t factor_step;
  bool divides;
  Type through;
};

// Where the parts of a piece of a warp lie in shared memory.
template <class Kind>
struct Piece {
  static constexpr uint32_t kBlocks = kPieceColumns / Kind::kColumns, kScalesAt = kBlocks * Kind::kBytes;
  static constexpr uint32_t kZerosAt = kScalesAt + kBlocks * Kind::kScaleBytes;
  static constexpr uint32_t kBytes = (kZerosAt + kBlocks * Kind::kZeroBytes + 15) / 16 * 16;
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

// Eight values, rounded to `through` first, 16 bytes at a time.
template <typename T>
__device__ __forceinline__ void write_eight(T* to, float (&values)[8], Type through) {
  constexpr int kOfWord = 4 / sizeof(T);
#pragma unroll
  for (float& value : values) {
    if (through == Type::kFloat16) value = rounded<__half>(value);
    if (through == Type::kBFloat16) value = rounded<__nv_bfloat16>(value);
  }
#pragma unroll
  for (int i = 0; i < 8; i += 4 * kOfWord) {
    __stcg(reinterpret_cast<uint4*>(to + i),
           make_uint4(rounded_word<T>(values + i), rounded_word<T>(values + i + kOfWord),
                      rounded_word<T>(values + i + 2 * kOfWord), rounded_word<T>(values + i + 3 * kOfWord)));
  }
}

template <class Kind>
__device__ __forceinline__ void copy_piece(uint8_t* piece, const Slab& p, uint32_t tile, uint32_t column,
                                           uint32_t count) {
  using At = Piece<Kind>;
  const uint64_t first = uint64_t(tile) * (p.in / Kind::kColumns) + column / Kind::kColumns;
  copy_blocks<Kind::kBytes, At::kBlocks>(piece, p.codes + first * Kind::kBytes, count);
  if constexpr (Kind::kScaleBytes != 0) {
    copy_blocks<Kind::kScaleBytes, At::kBlocks>(piece + At::kScalesAt, p.scales + first * Kind::kScaleBytes, count);
  }
  if constexpr (Kind::kZeroBytes != 0) {
    copy_blocks<Kind::kZeroBytes, At::kBlocks>(piece + At::kZerosAt, p.zeros + first * Kind::kZeroBytes, count);
  }
}

template <class Kind, typename T>
__global__ void __launch_bounds__(32 * kWarps) scaled_dequantize_kernel(const Slab p, T* out) {
  using At = Piece<Kind>;
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
  uint8_t* const piece = shared_memory() + warp * At::kBytes;
  const uint32_t number = blockIdx.x * kWarps + warp, tile = number / p.pieces;
  const uint32_t column = number % p.pieces * kPieceColumns, columns = min(p.in - column, uint32_t(kPieceColumns));
  if (number < p.count) copy_piece<Kind>(piece, p, tile, column, columns / Kind::kColumns);
  end_copies();
  dependency_wait();
  release_dependents();
  if (number >= p.count) return;
  const uint32_t first = tile * kTileRows + g;
  Factors factors = {{1.f, 1.f}, p.divides};
  if (p.factors != nullptr) {
    factors.value = {p.factors[first * p.factor_step], p.factors[(first + 8) * p.factor_step]};
  }
  wait_for_copies<0>();
  __syncwarp();
  T* const row = out + uint64_t(first) * p.in + column + 8 * t;
#pragma unroll 1
  for (uint32_t run = 0; run < columns / 32; ++run) {
    float w[2][8];
    constexpr uint32_t kRuns = Kind::kColumns / 32;
    const uint32_t block = run / kRuns;
    Kind::weights(w, piece + block * Kind::kBytes, piece + At::kScalesAt + block * Kind::kScaleBytes,
                  piece + At::kZerosAt + block * Kind::kZeroBytes, run % kRuns, factors);
#pragma unroll
    for (int i = 0; i < 2; ++i) write_eight(row + uint64_t(8 * i) * p.in + 32 * run, w[i], p.through);
  }
}

template <class Kind, typename T>
void launch_typed(const Slab& p, void* out, int device, cudaStream_t stream) {
  launch(kOp, device, scaled_dequantize_kernel<Kind, T>, dim3((p.count + kWarps - 1) / kWarps), dim3(32 * kWarps),
         kWarps * Piece<Kind>::kBytes, stream, p, static_cast<T*>(out));
}

template <class Kind>
void launch_kind(const ScaledMatrix& w, void* out, Type type, int64_t row_begin, int64_t row_count, int device,
                 cudaStream_t stream) {
  require(w.in > 0 && w.in % Kind::kColumns == 0, kOp, "in", w.in, "must be a positive multiple of a block's columns");
  const int64_t pieces = (w.in + kPieceColumns - 1) / kPieceColumns;
  require(w.in <= 1 << 24 && row_count / kTileRows * pieces < 1 << 30, kOp, "out", w.out, "is too large");
  const int64_t before = row_begin / kTileRows * (w.in / Kind::kColumns);
  if (Kind::kScaleBytes != 0) require_aligned(w.scales, 16, kOp, "scales");
  if (Kind::kZeroBytes != 0) require_aligned(w.zeros, 16, kOp, "zeros");
  Slab p = {};
  p.codes = w.codes + before * Kind::kBytes;
  p.scales = w.scales + before * Kind::kScaleBytes;
  p.zeros = w.zeros + before * Kind::kZeroBytes;
  p.factors = w.by_row ? w.factors + row_begin : w.factors, p.factor_step = w.by_row ? 1 : 0, p.divides = w.divides;
  p.in = uint32_t(w.in), p.pieces = uint32_t(pieces), p.count = uint32_t(row_count / kTileRows * pieces);
  p.through = w.through;
  switch (type) {
    case Type::kFloat16:
      return launch_typed<Kind, __half>(p, out, device, stream);
    case Type::kBFloat16:
      return launch_typed<Kind, __nv_bfloat16>(p, out, device, stream);
    case Type::kFloat32:
      return launch_typed<Kind, float>(p, out, device, stream);
  }
  require(false, kOp, "dtype", static_cast<int>(type), "must be float16, bfloat16 or float32");
}

using Launcher = void (*)(const ScaledMatrix&, void*, Type, int64_t, int64_t, int, cudaStream_t);

Launcher launcher_of(ScaledKind kind) {
  switch (kind) {
    case ScaledKind::kNvfp4:
      return launch_kind<Nvfp4>;
    case ScaledKind::kFp8Blocks:
      return launch_kind<Fp8<true>>;
    case ScaledKind::kFp8Rows:
      return launch_kind<Fp8<false>>;
    case ScaledKind::kInt8Rows:
      return launch_kind<Int8Rows>;
    case ScaledKind::kInt8By32:
      return launch_kind<Int8Groups<32>>;
    case ScaledKind::kInt8By64:
      return launch_kind<Int8Groups<64>>;
    case ScaledKind::kInt8By128:
      return launch_kind<Int8Groups<128>>;
  }
  require(false, kOp, "kind", static_cast<int>(kind), "has no kernel");
  return nullptr;
}

}  // namespace

void scaled_dequantize(const ScaledMatrix& w, ScaledKind kind, void* out, Type type, int64_t row_begin,
                       int64_t row_count, int device, cudaStream_t stream) {
  require(w.out >= kTileRows && w.out % kTileRows == 0, kOp, "out", w.out, "must be a positive multiple of 16");
  const bool cut = row_begin % kTileRows != 0 || row_count % kTileRows != 0;
  require(row_begin >= 0 && row_begin < w.out && !cut, kOp, "row_begin", row_begin,
          "must be a row of the matrix, in whole tiles of 16 rows");
  require(row_count > 0 && row_count <= w.out - row_begin, kOp, "row_count", row_count, "is not within the matrix");
  require_aligned(w.codes, 16, kOp, "codes");
  if (w.factors != nullptr) require_aligned(w.factors, 4, kOp, "factors");
  require_aligned(out, 16, kOp, "out");
  const Launcher run = launcher_of(kind);
  const DeviceGuard guard(device, kOp);
  run(w, out, type, row_begin, row_count, device, stream);
}

}  // namespace localq
