// out = rows row_begin .. row_begin + row_count - 1 of a matrix of 4-bit weights as f16, bf16 or f32, row by row,
// packed columns, bit for bit as localq/quant/int4_codec.py gives them:
//   out = round(round_S((code - zero) * scale))        S the type of the scales; the product is exact in f32 but for S
//   = f32, where it is rounded once
// Needs the tiled order (layout.cuh), out % 16 == 0, in % 64 == 0, groups of a multiple of 8 columns or one of all; a
// slab is whole tiles.
//
// A warp takes kUnroll blocks of 64 columns of a tile, 512 bytes each, all loaded before the first use; 8 columns of a
// row are one 16-byte store of 16-bit weights, 64 contiguous bytes a row of a block. Bound: memory. Moves n * (1/2
// + 2.5 / group + sizeof(T)) bytes.
#include "common/gemv.cuh"
#include "common/launch.h"
#include "common/rounding.cuh"
#include "int4/int4.h"
#include "int4/layout.cuh"

namespace localq {
namespace {

using namespace int4;

constexpr const char* kOp = "int4_dequantize";
constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kUnroll = 4;  // blocks in flight a warp

struct Arguments {
  const uint8_t *codes, *scales, *zeros;
  uint32_t first, blocks, groups, count;  // first block of the slab; blocks of a row; blocks of the slab
  uint32_t shift;                         // a group is 2^shift columns; 31: all of them
};

// Eight columns of the rows g and g + 8: scales and zero points of their group.
template <typename S>
struct Affine {
  S scale[2];
  uint32_t zeros;  // a byte
};

template <typename S>
__device__ __forceinline__ Affine<S> load_affine(const Arguments& p, uint32_t tile, uint32_t column, uint32_t g) {
  const uint64_t at = (uint64_t(tile) * p.groups + (column >> p.shift)) * 8 + g;
  const Run<S, 2> pair = reinterpret_cast<const Run<S, 2>*>(p.scales)[at];
  return {{pair.value[0], pair.value[1]}, p.zeros[at]};
}

// Two differences, neighbours of a row, times their scale.
template <typename S, typename T>
__device__ __forceinline__ void scaled(T* to, __half2 pair, S scale) {
  const float2 both = __half22float2(pair);
  round_to(rounded<S>(__fmul_rn(both.x, to_float(scale))), to[0]);
  round_to(rounded<S>(__fmul_rn(both.y, to_float(scale))), to[1]);
}
__device__ __forceinline__ void scaled(__half* to, __half2 pair, __half scale) {  // the same in fewer instructions
  const __half2 both = __hmul2(pair, __half2half2(scale));
  to[0] = __low2half(both), to[1] = __high2half(both);
}

// Eight columns of rows g and g + 8.
template <typename S, typename T>
__device__ __forceinline__ void write(T* low, T* high, const uint32_t (&words)[2], const Affine<S>& of) {
  uint32_t zeros[2];
  spread_zeros<__half>(zeros, of.zeros, 0);
  Run<T, 8> rows[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t a[4];
    decode<__half>(a, words[i], zeros);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float back = Nibble<__half>::kBack / (k % 2 == 0 ? 1.f : 16.f);
      const __half2 pair = __hmul2(as<__half2>(a[k]), __float2half2_rn(back));
      scaled(rows[k % 2].value + 4 * i + k / 2 * 2, pair, of.scale[k % 2]);
    }
  }
  *reinterpret_cast<Run<T, 8>*>(low) = rows[0];
  *reinterpret_cast<Run<T, 8>*>(high) = rows[1];
}

template <typename S, typename T>
__global__ void __launch_bounds__(kThreads) int4_dequantize_kernel(const Arguments p, T* out) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t begin = (blockIdx.x * kWarps + threadIdx.x / 32) * kUnroll;
  uint4 codes[kUnroll] = {};
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    load_codes(codes[u], p.codes + (uint64_t(p.first) + begin + u) * kBlockBytes + lane * 16, int(p.count - begin), u);
  }
  dependency_wait();
  release_dependents();
  uint32_t tile = begin / p.blocks, block = begin % p.blocks;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (begin + u >= p.count) return;
    T* const row = out + (uint64_t(tile) * kTile + g) * p.blocks * kBlock;
    const uint32_t halves[2][2] = {{codes[u].x, codes[u].y}, {codes[u].z, codes[u].w}};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t column = block * kBlock + 32 * half + 8 * t;
      const Affine<S> of = load_affine<S>(p, p.first / p.blocks + tile, column, g);
      write(row + column, row + uint64_t(8) * p.blocks * kBlock + column, halves[half], of);
    }
    if (++block == p.blocks) block = 0, ++tile;
  }
}

template <typename S, typename T>
void launch_typed(const Arguments& p, void* out, int device, cudaStream_t stream) {
  constexpr uint32_t kTogether = kWarps * kUnroll;
  launch(kOp, device, int4_dequantize_kernel<S, T>, dim3((p.count + kTogether - 1) / kTogether), dim3(kThreads), 0,
         stream, p, static_cast<T*>(out));
}

template <typename S>
void launch_stored(const Arguments& p, void* out, Type type, int device, cudaStream_t stream) {
  switch (type) {
    case Type::kFloat16:
      return launch_typed<S, __half>(p, out, device, stream);
    case Type::kBFloat16:
      return launch_typed<S, __nv_bfloat16>(p, out, device, stream);
    case Type::kFloat32:
      return launch_typed<S, float>(p, out, device, stream);
  }
  require(false, kOp, "dtype", static_cast<int>(type), "must be float16, bfloat16 or float32");
}

uint32_t shift_of(const Int4& w) {
  if (w.group >= w.in) return 31;
  uint32_t shift = 3;
  while (int64_t(1) << shift < w.group) ++shift;
  require(int64_t(1) << shift == w.group, kOp, "group", w.group, "must be a power of two from 8 on");
  return shift;
}

}  // namespace

void int4_dequantize(const Int4& w, Type stored, void* out, Type type, int64_t row_begin, int64_t row_count, int device,
                     cudaStream_t stream) {
  require(w.in >= kBlock && w.in % kBlock == 0, kOp, "in", w.in, "must be a positive multiple of 64");
  require(w.out >= kTile && w.out % kTile == 0, kOp, "out", w.out, "must be a positive multiple of 16");
  const int64_t blocks = w.in / kBlock;
  require(w.in <= 1 << 30 && w.out / kTile * blocks < 1 << 30, kOp, "out", w.out, "is too large");
  const bool cut = row_begin % kTile != 0 || row_count % kTile != 0;
  require(row_begin >= 0 && row_begin < w.out && !cut, kOp, "row_begin", row_begin, "is not that of a tile of 16 rows");
  require(row_count > 0 && row_count <= w.out - row_begin, kOp, "row_count", row_count, "is not within the matrix");
  require_aligned(w.codes, 16, kOp, "codes");
  require_aligned(w.scales, stored == Type::kFloat32 ? 8 : 4, kOp, "scales");
  require_aligned(w.zeros, 1, kOp, "zeros");
  require_aligned(out, 16, kOp, "out");
  Arguments p = {};
  p.codes = w.codes, p.scales = static_cast<const uint8_t*>(w.scales), p.zeros = w.zeros;
  p.blocks = uint32_t(blocks);
  p.first = uint32_t(row_begin / kTile * blocks), p.count = uint32_t(row_count / kTile * blocks);
  p.shift = shift_of(w);
  p.groups = uint32_t(p.shift == 31 ? 1 : (w.in + w.group - 1) / w.group);
  const DeviceGuard guard(device, kOp);
  switch (stored) {
    case Type::kFloat16:
      return launch_stored<__half>(p, out, type, device, stream);
    case Type::kBFloat16:
      return launch_stored<__nv_bfloat16>(p, out, type, device, stream);
    case Type::kFloat32:
      return launch_stored<float>(p, out, type, device, stream);
  }
  require(false, kOp, "scales", static_cast<int>(stored), "must be float16, bfloat16 or float32");
}

}  // namespace localq
