// y = extras(x W^T), W in AQLM with one codebook of 16-bit codes (localq/quant/aqlm.py): 1x16 in groups of 8 or 16.
//   codes     u16 [out, in / group], one to three matrices that share x     x T [rows, in]
//   codebook  T [entries, group] of each                                    y T or f32 [rows, sum of outs]
//   scales    T [out], applied to the sum over columns: W is not rounded
// The frame is that of rows/gemv_kernel.cuh: tiles of 16 rows of W, m16n8k16, items taken in turn by the warps of a
// block, shares added in the order of the items. An item is 256 columns of a tile. Lane (g, t) has 8 codes of row g and
// 8 of row g + 8, and 16 bytes of each of their codewords: with groups of 8 the lanes t have codes of their own; with
// groups of 16 two lanes share them, and each takes its half of a codeword, so that one request asks for the whole
// sector.
//
// In flight per thread: 16 gathers (one item), asked for one by one as those before are multiplied, and the codes of
// the item after. Codes and codewords of a block's first items are asked for before the kernel that makes x has ended.
//
// Bound: sectors of L2, 32 bytes per code less what shared memory keeps (codebook.cuh); codes themselves are 2
// bytes. Deterministic, as rows/gemv_kernel.cuh is. Codes count modulo the entries, so none reads out of bounds; rows
// and columns that are not there have code 0, and x of zeros.
#include "common/mma.cuh"
#include "gather/aqlm_gemv_kernel.cuh"
#include "gather/gemv.h"

namespace localq {
namespace {

constexpr const char* kOp = "gather_gemv";

// What a warp carries from item to item: codewords of the item at `now`, rows and codes of that at `next`.
struct Pipeline {
  Cursor now, next;
  TileRows rows;
  Codes codes;
  uint4 ring[kSlots][2];
};

// All of the warp's items of a group of tiles.
template <typename T, int kLanes>
__device__ __forceinline__ void sum_tiles(const GatherGemv& p, const Span& span, float* shares, uint32_t first,
                                          const XLane& x, Pipeline& pipeline, uint32_t own, uint32_t kept_at) {
  const uint32_t end = min(first + p.group, span.tiles);
  float sum[4] = {};
#pragma unroll 1
  while (pipeline.now.tile < end) {
    const Cursor now = pipeline.now;
    const uint8_t* from = x.x + now.item * kItemXBytes;
    const int left = x.left - int(now.item * (32 / kLanes));
    pipeline.now = pipeline.next;
    pipeline.next.advance(p.items);
    const Books books = tile_books(p, pipeline.rows, own, kept_at);
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      const uint4 words = load_x(from, left, j), low = pipeline.ring[j][0], high = pipeline.ring[j][1];
      from += x.step;
      const uint32_t a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
      mma(sum, a[0], words.x, words.y, T{});
      mma(sum, a[1], words.z, words.w, T{});
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        pipeline.ring[j][i] = codeword<kLanes>(books.row[i], pipeline.codes.row[i], j, p.mask);
      }
    }
    // behind the gathers: ptxas waits for all loads at once, so before them every item would wait for memory as well
    if (pipeline.next.tile != pipeline.now.tile) pipeline.rows = tile_rows(p, span, pipeline.next.tile);
    pipeline.codes = load_codes<kLanes>(p, pipeline.rows, pipeline.next.item);
    if (pipeline.now.tile == now.tile) continue;
    leave_share(shares + ((now.tile - first) * kRowWarps + threadIdx.x / 32) * kRowTile * p.rows, sum, p.rows);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = 0.f;
  }
}

// The begin of a warp: asks for the codes of its first item. First of all, since nothing is under way yet: every
// instruction in front of it is some 5 cycles of the whole block's time.
template <int kLanes>
__device__ __forceinline__ Codes first_codes(const GatherGemv& p, const Span& span, Pipeline& pipeline) {
  pipeline.now = pipeline.next = cursor_of(threadIdx.x / 32, p.items);
  pipeline.rows = tile_rows(p, span, pipeline.now.tile);
  return load_codes<kLanes>(p, pipeline.rows, pipeline.now.item);
}

// Goes on with the codes of the item after, the entries that the block keeps, and the first item's codewords.
template <int kLanes>
__device__ __forceinline__ void first_codewords(const GatherGemv& p, const Span& span, const Codes& codes,
                                                Pipeline& pipeline, uint32_t own, uint32_t kept_at) {
  const Books books = tile_books(p, pipeline.rows, own, kept_at);
  pipeline.next.advance(p.items);
  if (pipeline.next.tile != pipeline.now.tile) pipeline.rows = tile_rows(p, span, pipeline.next.tile);
  pipeline.codes = load_codes<kLanes>(p, pipeline.rows, pipeline.next.item);
  const bool paired = p.span != kRowTile;
  if (p.kept != 0) {
    for (uint32_t i = 0; i < (paired ? 2u : 1u); ++i) {
      keep({p.codebook[paired ? i : own], kept_at + i * p.kept, p.kept});
    }
    wait_kept();
    __syncthreads();
  }
#pragma unroll
  for (int j = 0; j < kSlots; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) pipeline.ring[j][i] = codeword<kLanes>(books.row[i], codes.row[i], j, p.mask);
  }
}

// x [rows, in] to shared memory in the order of the slots, zeros behind the end of a row; then synchronise.
template <typename T, int kLanes>
__device__ __forceinline__ void stage_slots(const GatherGemv& p, uint8_t* staged, const T* x, float* scratch) {
  const uint32_t words = p.in / 8, all = p.items * kItemWords;
  const BySlots<kLanes> order;
  for (int row = 0; row < p.rows; ++row) {
    auto* const to = reinterpret_cast<T*>(staged + row * p.x_stride);
    stage_x<kXInFlight>(to, x + uint64_t(row) * p.in, p.in, p.extras, scratch, order);
    for (uint32_t i = words + threadIdx.x; i < all; i += kRowThreads) {
      reinterpret_cast<uint4*>(to)[order(i)] = make_uint4(0, 0, 0, 0);
    }
  }
}

// kLanes: lanes that share a codeword, 16 bytes each; 1 for groups of 8, 2 for groups of 16.
template <typename T, int kLanes>
__global__ void __launch_bounds__(kRowThreads, 1) gather_gemv_kernel(const __grid_constant__ GatherGemv p,
                                                                     const T* x,  // [rows, in]
                                                                     void* y) {   // T or f32 [rows, results]
  uint8_t* const memory = shared_memory();
  const uint32_t set_floats = p.group * kRowWarps * kRowTile * p.rows;
  float* const scratch = reinterpret_cast<float*>(memory);
  float* const shares = scratch + kRowWarps;
  uint8_t* const staged = reinterpret_cast<uint8_t*>(shares + 2 * set_floats);
  const uint32_t kept_at = shared_address(staged + p.rows * p.x_stride);
  const Span span = span_of(p);
  Pipeline pipeline;
  const Codes codes = first_codes<kLanes>(p, span, pipeline);
  uint32_t middle = (span.begin + span.end) / 2;
  const uint32_t own = p.span != kRowTile ? 0 : segment_number(p, middle);
  first_codewords<kLanes>(p, span, codes, pipeline, own, kept_at);
  release_dependents();
  dependency_wait();
  if (p.x_stride != 0) stage_slots<T, kLanes>(p, staged, x, scratch);
  __syncthreads();
  const XLane source = x_lane<T, kLanes>(p, staged, x);
#pragma unroll 1
  for (uint32_t first = 0, set = 0; first < span.tiles; first += p.group, set ^= 1) {
    float* const mine = shares + set * set_floats;
    sum_tiles<T, kLanes>(p, span, mine, first, source, pipeline, own, kept_at);
    __syncthreads();
    write_group<T>(p, span, mine, first, y);
  }
}

// Fills in what follows from sizes and device, and launches.
template <typename T, int kLanes>
void launch_gather(GatherGemv p, int count, uint32_t entries, const void* x, void* y, int device, cudaStream_t stream) {
  const DeviceFacts& facts = device_facts(device, kOp);
  const bool paired = p.extras.activation != Activation::kNone;
  p.items = (p.in + kItemColumns - 1) / kItemColumns;
  p.span = paired ? kRowTile / 2 : kRowTile;
  for (int i = 0; i < (paired ? 1 : count); ++i) p.results += p.segment[i].out;
  const uint32_t grid = cut_results(p, uint32_t(facts.multiprocessors));
  const uint32_t tiles = tiles_of(p.each + (p.more > 0), p.span);
  const uint32_t tile_bytes = kRowWarps * kRowTile * p.rows * sizeof(float), fit = kShareBudget / tile_bytes;
  p.group = tiles < fit ? tiles : fit;
  const uint32_t others = kRowWarps * sizeof(float) + 2 * p.group * tile_bytes;
  const uint32_t most = uint32_t(facts.shared_bytes_per_block), stride = p.items * kItemXBytes + 64;
  const bool staged = others + uint64_t(p.rows) * stride <= most;
  require(staged || p.extras.norm == NormKind::kNone, kOp, "in", p.in, "is too large for a norm on this device");
  p.x_stride = staged ? stride : 0;  // 64 past whole lines: lanes of two rows of x then meet no bank twice
  const uint32_t needed = others + p.rows * p.x_stride;
  const uint32_t entry_bytes = 16 * kLanes, whole = entries * entry_bytes;
  const uint64_t codes = uint64_t(p.results) * (p.row_bytes / 2) / grid;  // of a block that name one codebook
  if (worth_keeping(codes, entries, entry_bytes)) {
    p.kept = kept_of(most, needed, paired ? 2 : 1, whole, entry_bytes);
  }
  // Two blocks would not fit on a multiprocessor in any case, a thread has more than 128 registers; so no more is asked
  // for than is used, and the rest is L1.
  launch(kOp, device, LaunchWishes{1, true}, gather_gemv_kernel<T, kLanes>, grid, kRowThreads,
         needed + (paired ? 2 : 1) * p.kept, stream, p, static_cast<const T*>(x), y);
}

void check_matrix(const GatherMatrix& w, const GatherMatrix& first) {
  require(w.in == first.in, kOp, "in", w.in, "must be that of the first matrix");
  require(w.group == first.group, kOp, "group", w.group, "must be that of the first matrix");
  require(w.entries == first.entries, kOp, "entries", w.entries, "must be those of the first matrix");
  require_aligned(w.codes, 16, kOp, "codes");
  require_aligned(w.codebook, 16, kOp, "codebook");
  require_aligned(w.scales, 2, kOp, "scales");
}

}  // namespace

void gather_gemv(const GatherMatrix* matrices, int count, const GemvExtras& extras, const void* x, void* y, Type type,
                 int rows, int device, cudaStream_t stream) {
  require(count >= 1 && count <= kMaxSegments, kOp, "matrices", count, "must be from 1 to 3");
  const GatherMatrix& first = matrices[0];
  require(first.group == 8 || first.group == 16, kOp, "group", first.group, "must be 8 or 16");
  require(first.in >= 2 * first.group && first.in % (2 * first.group) == 0, kOp, "in", first.in,
          "must be a positive multiple of two groups");
  require(first.in <= 1 << 24, kOp, "in", first.in, "must be at most 2^24");
  require(first.entries >= 2 && first.entries <= 1 << 16 && (first.entries & (first.entries - 1)) == 0, kOp, "entries",
          first.entries, "must be a power of two, at most 65536");
  GatherGemv p = {};
  int64_t outs[kMaxSegments] = {};
  for (int i = 0; i < count; ++i) {
    check_matrix(matrices[i], first);
    outs[i] = matrices[i].out;
    p.segment[i] = {reinterpret_cast<const uint8_t*>(matrices[i].codes), nullptr, extras.bias[i], uint32_t(outs[i]),
                    matrices[i].scales};
    p.codebook[i] = static_cast<const uint8_t*>(matrices[i].codebook);
  }
  check_row_gemv(kOp, outs, count, extras, x, y, type, rows);
  p.extras = extras;
  p.in = uint32_t(first.in);
  p.row_bytes = uint32_t(2 * (first.in / first.group));
  p.rows = rows;
  p.mask = uint32_t((first.entries - 1) * first.group * 2);
  p.narrow = p.row_bytes % 16 != 0;
  const DeviceGuard guard(device, kOp);
  const auto entries = uint32_t(first.entries);
  const bool half = type == Type::kFloat16, eight = first.group == 8;
  if (half && eight) return launch_gather<__half, 1>(p, count, entries, x, y, device, stream);
  if (half) return launch_gather<__half, 2>(p, count, entries, x, y, device, stream);
  if (eight) return launch_gather<__nv_bfloat16, 1>(p, count, entries, x, y, device, stream);
  launch_gather<__nv_bfloat16, 2>(p, count, entries, x, y, device, stream);
}

}  // namespace localq
