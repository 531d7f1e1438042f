// W = scale * sums of codewords (localq/quant/additive.py), to f16, bf16 or f32: AQLM in every layout, and vq2,
// row by row; of codes in tiles, what dequantize.cu has no kernel for.
//   sets    one or two of codes, codebooks, stride and length (additive.h)
//   scales  C [out / out_group], C the type of the codebooks
//   out     O [row_count, in]
// A thread makes kRun neighbouring weights of a row; kRun divides the stride, so they have the same codes. Terms are
// added in f32 in the order of the definition: set by set, earlier positions first, for each the codebooks in order.
// The definition's roundings: `rounded` (AQLM) the sum to C, its product with the scale to C, that to O; else (vq2) the
// f32 product to O. Codes count modulo the entries: none reads out of bounds.
// Bound: memory, sizeof(O) bytes per weight written and the codes read, where codebooks fit into shared memory (48 KB:
// 2x8, 1x8, vq2). A codebook of 65,536 entries is gathered from L2: a sector of 32 bytes for 16 of a codeword of 8.
#include "common/check.h"
#include "common/launch.h"
#include "common/rounding.cuh"
#include "common/shared_memory.cuh"
#include "lookup/additive.h"

namespace localq {
namespace {

constexpr const char* kOp = "additive_dequantize";
constexpr int kThreads = 256, kBlocksPerMultiprocessor = 4;
constexpr uint32_t kSharedBytes = 48 * 1024;  // of codebooks, at most
constexpr uint32_t kTile = 16;                // rows of a tile

struct Set {
  const uint8_t* codes;
  const void* codebooks;
  uint32_t books, entries, length, stride, positions;
  uint32_t row_length;  // of a codeword that a row has: length / out_group
  uint32_t offset;      // bytes into shared memory
  bool wide;
  uint32_t before, tile_positions;  // of codes in tiles, else 0
};

struct Arguments {
  Set set[2];
  const void* scales;
  uint32_t sets, in, out_group, runs, row_runs;  // runs: of the slab, and of a row
  uint32_t first;                                // row of the slab
  bool staged, rounded;
};

__device__ __forceinline__ uint32_t code_at(const Set& set, uint64_t at) {
  const uint32_t code = set.wide ? reinterpret_cast<const uint16_t*>(set.codes)[at] : set.codes[at];
  return code & (set.entries - 1);
}

// Adds the terms of one set to the weights of row `row`, from `column` on.
template <typename C, int kRun>
__device__ __forceinline__ void add_set(float (&sum)[kRun], const Set& set, const C* table, uint32_t row,
                                        uint32_t column, uint32_t out_group) {
  const uint32_t group = out_group == 1 ? row : row / out_group, part = row - group * out_group;
  const uint32_t position = column / set.stride, within = column - position * set.stride;
  // where the codes of the row begin, and how far positions lie apart
  const bool tiled = set.tile_positions != 0;
  const uint64_t tile = uint64_t(row / kTile) * set.tile_positions + set.before;
  const uint64_t codes = tiled ? tile * kTile + row % kTile : uint64_t(group) * set.positions * set.books;
  const uint32_t apart = tiled ? kTile : set.books;
  for (uint32_t lag = set.row_length / set.stride; lag-- > 0;) {
    if (lag > position) continue;
    const uint32_t skipped = part * set.row_length + lag * set.stride + within;
    for (uint32_t book = 0; book < set.books; ++book) {
      const uint32_t code = code_at(set, codes + uint64_t(position - lag) * apart + book);
      const C* const from = table + uint64_t(book * set.entries + code) * set.length + skipped;
      const Run<C, kRun> run = *reinterpret_cast<const Run<C, kRun>*>(from);
#pragma unroll
      for (int i = 0; i < kRun; ++i) sum[i] = __fadd_rn(sum[i], to_float(run.value[i]));
    }
  }
}

// All codebooks to shared memory, in words of 4 bytes; then synchronise.
__device__ __forceinline__ void stage(const Arguments& p, uint8_t* memory, uint32_t item_bytes) {
  for (uint32_t s = 0; s < p.sets; ++s) {
    const uint32_t words = p.set[s].books * p.set[s].entries * p.set[s].length * item_bytes / 4;
    auto* const to = reinterpret_cast<uint32_t*>(memory + p.set[s].offset);
    const auto* const from = static_cast<const uint32_t*>(p.set[s].codebooks);
    for (uint32_t i = threadIdx.x; i < words; i += kThreads) to[i] = from[i];
  }
}

template <typename C, typename O, int kRun>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    additive_dequantize_kernel(const __grid_constant__ Arguments p,
                               O* out) {  // [runs * kRun]
  uint8_t* const memory = shared_memory();
  release_dependents();
  dependency_wait();  // codebooks may have just been fitted or trained
  if (p.staged) stage(p, memory, sizeof(C));
  __syncthreads();
  const C* tables[2];
  for (int s = 0; s < 2; ++s) {
    tables[s] =
        static_cast<const C*>(p.staged ? static_cast<const void*>(memory + p.set[s].offset) : p.set[s].codebooks);
  }
  for (uint64_t run = blockIdx.x * kThreads + threadIdx.x; run < p.runs; run += gridDim.x * kThreads) {
    const uint32_t in_slab = uint32_t(run) / p.row_runs, row = p.first + in_slab;
    const uint32_t column = (uint32_t(run) - in_slab * p.row_runs) * kRun;
    float sum[kRun] = {};
    add_set<C, kRun>(sum, p.set[0], tables[0], row, column, p.out_group);
    if (p.sets == 2) add_set<C, kRun>(sum, p.set[1], tables[1], row, column, p.out_group);
    const float scale = to_float(static_cast<const C*>(p.scales)[row / p.out_group]);
    Run<O, kRun> weights;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const float weight = __fmul_rn(p.rounded ? rounded<C>(sum[i]) : sum[i], scale);
      round_to(p.rounded ? rounded<C>(weight) : weight, weights.value[i]);
    }
    reinterpret_cast<Run<O, kRun>*>(out)[run] = weights;
  }
}

template <typename C, typename O, int kRun>
void launch_runs(Arguments p, uint32_t shared_bytes, int64_t rows, void* out, int device, cudaStream_t stream) {
  p.row_runs = p.in / kRun;
  require(rows * p.row_runs < int64_t(1) << 32, kOp, "row_count", rows, "is too large for one launch");
  p.runs = uint32_t(rows * p.row_runs);
  const uint32_t most = kBlocksPerMultiprocessor * uint32_t(device_facts(device, kOp).multiprocessors);
  const uint32_t blocks = (p.runs - 1) / kThreads + 1;
  launch(kOp, device, additive_dequantize_kernel<C, O, kRun>, blocks < most ? blocks : most, kThreads, shared_bytes,
         stream, p, static_cast<O*>(out));
}

template <typename C, typename O>
void launch_types(const Arguments& p, uint32_t run, uint32_t shared_bytes, int64_t rows, void* out, int device,
                  cudaStream_t stream) {
  if (run % 8 == 0) return launch_runs<C, O, 8>(p, shared_bytes, rows, out, device, stream);
  if (run % 4 == 0) return launch_runs<C, O, 4>(p, shared_bytes, rows, out, device, stream);
  launch_runs<C, O, 1>(p, shared_bytes, rows, out, device, stream);
}

template <typename C>
void launch_stored(const Arguments& p, uint32_t run, uint32_t shared_bytes, int64_t rows, void* out, Type type,
                   int device, cudaStream_t stream) {
  if (type == Type::kFloat16) return launch_types<C, __half>(p, run, shared_bytes, rows, out, device, stream);
  if (type == Type::kFloat32) return launch_types<C, float>(p, run, shared_bytes, rows, out, device, stream);
  launch_types<C, __nv_bfloat16>(p, run, shared_bytes, rows, out, device, stream);
}

Set checked_set(const CodeSet& set, const Additive& w) {
  require(set.stride >= 1 && w.in % set.stride == 0, kOp, "stride", set.stride, "must divide in");
  const bool whole = set.length >= 1 && set.length <= 1 << 16 && set.length % w.out_group == 0;
  require(whole && set.length / w.out_group % set.stride == 0, kOp, "length", set.length,
          "must be a multiple of out_group * stride, at most 65536");
  const int64_t most = set.wide ? 1 << 16 : 1 << 8;
  require(set.entries >= 2 && set.entries <= most && (set.entries & (set.entries - 1)) == 0, kOp, "entries",
          set.entries, "must be a power of two that the codes can count to");
  require(set.books >= 1 && set.books <= 256, kOp, "books", set.books, "must be from 1 to 256");
  const bool plain = set.books == 1 && !set.wide && w.out_group == 1;
  require(set.tile_positions == 0 || plain, kOp, "tile_positions", set.tile_positions, "must be 0 for these codes");
  require_aligned(set.codes, set.wide ? 2 : 1, kOp, "codes");
  require_aligned(set.codebooks, 16, kOp, "codebooks");
  return {static_cast<const uint8_t*>(set.codes),
          set.codebooks,
          uint32_t(set.books),
          uint32_t(set.entries),
          uint32_t(set.length),
          uint32_t(set.stride),
          uint32_t(w.in / set.stride),
          uint32_t(set.length / w.out_group),
          0,
          set.wide,
          uint32_t(set.before),
          uint32_t(set.tile_positions)};
}

}  // namespace

void additive_dequantize(const Additive& w, Type stored, void* out, Type type, int64_t row_begin, int64_t row_count,
                         int device, cudaStream_t stream) {
  require(w.in >= 1 && w.in <= 1 << 24, kOp, "in", w.in, "must be from 1 to 2^24");
  require(w.out_group >= 1 && w.out % w.out_group == 0, kOp, "out_group", w.out_group, "must divide out");
  require(w.sets == 1 || w.sets == 2, kOp, "sets", w.sets, "must be 1 or 2");
  require(row_begin >= 0 && row_begin < w.out, kOp, "row_begin", row_begin, "must be a row of the matrix");
  require(row_count >= 1 && row_count <= w.out - row_begin, kOp, "row_count", row_count, "must be rows that are there");
  require(w.out < int64_t(1) << 31, kOp, "out", w.out, "is too large");
  require_aligned(w.scales, 2, kOp, "scales");
  require_aligned(out, 16, kOp, "out");
  Arguments p = {};
  uint64_t bytes = 0;
  uint32_t run = 0;  // every stride is a multiple of what this is one of: bits or-ed keep the lowest
  for (int s = 0; s < w.sets; ++s) {
    p.set[s] = checked_set(w.set[s], w);
    p.set[s].offset = uint32_t(bytes);
    const uint64_t count = uint64_t(w.set[s].books) * w.set[s].entries * w.set[s].length;
    bytes += (count * (stored == Type::kFloat32 ? 4 : 2) + 15) / 16 * 16;
    run |= uint32_t(w.set[s].stride);
    if (bytes > kSharedBytes) bytes = kSharedBytes + 16;
  }
  p.sets = uint32_t(w.sets), p.scales = w.scales, p.rounded = w.rounded;
  p.in = uint32_t(w.in), p.out_group = uint32_t(w.out_group), p.first = uint32_t(row_begin);
  p.staged = bytes <= kSharedBytes;
  const uint32_t shared = p.staged ? uint32_t(bytes) : 0;
  const DeviceGuard guard(device, kOp);
  if (stored == Type::kFloat16) return launch_stored<__half>(p, run, shared, row_count, out, type, device, stream);
  if (stored == Type::kFloat32) return launch_stored<float>(p, run, shared, row_count, out, type, device, stream);
  launch_stored<__nv_bfloat16>(p, run, shared, row_count, out, type, device, stream);
}

}  // namespace localq
