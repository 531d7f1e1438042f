// y = extras(x W^T), W in VPTQ (localq/quant/vptq.py): vectors of 8 or 16, with or without residuals, one group.
//   indices    packed u32 [vectors, words] or u16 [vectors, in]     x T [rows, in], one to three matrices that share it
//   centroids  T [count, vector], and residual ones                 y T or f32 [rows, sum of outs]
//   places     u16 [in], scale, bias T [in], or none of them
// W is rounded as the definition says (sum, product and sum again in T); products with x are added in f32.
//
// A block owns consecutive units (vectors of 8 or 16 results, vptq_gemv_kernel.cuh), the same number everywhere give or
// take one. It works on one matrix at a time, for every matrix has its own permutation: x goes to shared memory in the
// order of the places, with its norm, and scale and bias beside it, as many columns at a time as there is room for (a
// window: nearly always all). The warps take the items of the units in turn and add up in registers as long as the unit
// is the same; shares and sums of units are in shared memory, every sum has one order, there are no atomics.
//
// In flight per thread: the gathers of an item, 8 or 16, and the indices of another. Indices and codewords of a block's
// first items are asked for before the kernel that makes x has ended.
//
// Bound: sectors of L2, 32 bytes per index and table less what shared memory keeps (codebook.cuh). Indices are cut
// to the last entry, so none reads out of bounds; columns that are not there have index 0, and x of zeros.
#include "gather/gemv.h"
#include "gather/vptq_shared_memory.cuh"

namespace localq {
namespace {

constexpr const char* kOp = "vptq_gemv";

// sums[unit][value] += the shares of a group of units, in the order of the items.
template <uint32_t kValues>
__device__ __forceinline__ void add_shares(const VptqGemv& p, const float* shares, uint32_t first, uint32_t count,
                                           float* sums) {
  for (uint32_t i = threadIdx.x; i < count * kValues; i += kRowThreads) {
    const uint32_t unit = i / kValues, from = (first + unit) * p.items % kRowWarps;
    const uint32_t warps = min(p.items, uint32_t(kRowWarps));
    float sum = sums[first * kValues + i];
    for (uint32_t k = 0; k < warps; ++k) {
      sum += shares[(unit * kRowWarps + (from + k) % kRowWarps) * kValues + i % kValues];
    }
    sums[first * kValues + i] = sum;
  }
}

// One pass: `sums` of its units gain the window's products. `inverse_rms` is made in the first pass of the block.
template <typename T, typename Warp, int kRows>
__device__ __forceinline__ void run_pass(const VptqGemv& p, Pass& pass, const Memory<T, Warp, kRows>& memory,
                                         const T* x, float* sums, bool first_pass, float& inverse_rms) {
  __syncthreads();  // the pass before may still read what is staged
  typename Warp::Pipeline pipeline;
  pipeline.now = pipeline.next = cursor_of(threadIdx.x / 32, p.items);
  Warp::load_item(pipeline.raw, p, pass, pipeline.now);
  pipeline.next.advance(p.items);
  if (pass.begin == 0) keep(pass.book), keep(pass.res_book);
  stage_norm<T>(p, pass, memory.norm);
  wait_kept();
  __syncthreads();
  Warp::gather_item(pipeline.ring, p, pass, pipeline.raw);
  Warp::load_item(pipeline.raw, p, pass, pipeline.next);
  if (first_pass) {
    release_dependents();
    dependency_wait();
    inverse_rms = inverse_rms_of(p, x, memory.scratch);
  }
  stage_columns<T, kRows>(p, pass, memory.x, x, inverse_rms);
  __syncthreads();
  const auto* const norm = p.of[pass.segment].scale == nullptr ? nullptr : memory.norm;
#pragma unroll 1
  for (uint32_t first = 0, set = 0; first < pass.units; first += p.group, set ^= 1) {
    float* const mine = memory.shares + set * p.group * kRowWarps * Warp::kValues;
    Warp::sum_units(p, pass, mine, first, norm, memory.x, pipeline);
    __syncthreads();
    add_shares<Warp::kValues>(p, mine, first, min(p.group, pass.units - first), sums);
  }
}

// The matrix of unit `unit` of the launch, which becomes its vector there, and the number of its first result.
struct Owner {
  uint32_t segment, base;
};
__device__ __forceinline__ Owner owner_of(const VptqGemv& p, uint32_t& unit) {
  Owner owner = {0, 0};
  while (unit >= p.of[owner.segment].vectors) {
    unit -= p.of[owner.segment].vectors;
    owner.base += p.segment[owner.segment++].out;
  }
  return owner;
}

template <typename T, uint32_t kVector, uint32_t kValues>
__device__ __forceinline__ void write_units(const VptqGemv& p, const float* sums, uint32_t begin, uint32_t units,
                                            void* y) {
  const float* const second = sums + p.block_units * kValues;
  const bool paired = p.extras.activation != Activation::kNone;
  for (uint32_t i = threadIdx.x; i < units * kVector * p.rows; i += kRowThreads) {
    const uint32_t row = i / (units * kVector), result = i % (units * kVector);
    uint32_t vector = begin + result / kVector;
    const Owner owner = paired ? Owner{0, 0} : owner_of(p, vector);
    const uint32_t o = vector * kVector + result % kVector;
    if (o >= p.segment[owner.segment].out) continue;  // padding of the last vector
    const uint32_t at = result / kVector * kValues + row * kVector + result % kVector;
    write_result<T>(p, owner.base + o, row, sums[at], paired ? second[at] : 0.f, y);
  }
}

template <typename T, int kLanes, bool kResidual, int kRows>
__global__ void __launch_bounds__(kRowThreads, 1) vptq_gemv_kernel(const __grid_constant__ VptqGemv p,
                                                                   const T* x,  // [rows, in]
                                                                   void* y) {   // T or f32 [rows, results]
  using Warp = VptqWarp<T, kLanes, kResidual, kRows>;
  const Memory<T, Warp, kRows> memory(p, shared_memory());
  const bool paired = p.extras.activation != Activation::kNone;
  const uint32_t begin = uint64_t(p.units) * blockIdx.x / gridDim.x;
  const uint32_t end = uint64_t(p.units) * (blockIdx.x + 1) / gridDim.x;
  for (uint32_t i = threadIdx.x; i < (paired ? 2 : 1) * p.block_units * Warp::kValues; i += kRowThreads) {
    memory.sums[i] = 0.f;
  }
  float inverse_rms = 1.f;
  bool first_pass = true;
  uint32_t before = 0;  // units of the matrices before
#pragma unroll 1
  for (int s = 0; s < p.segments; ++s) {
    const uint32_t from = max(begin, before), to = min(end, before + p.of[s].vectors);
    Pass pass = {uint32_t(s), from - before, from < to ? to - from : 0, 0, {}, {}};
    pass.book = {p.of[s].centroids, memory.kept, p.kept};
    pass.res_book = {p.of[s].res_centroids, memory.kept + p.kept, p.res_kept};
    float* const sums = memory.sums + (paired ? uint32_t(s) * p.block_units : from - begin) * Warp::kValues;
    for (; pass.units != 0 && pass.begin < p.in; pass.begin += p.window) {
      run_pass<T, Warp, kRows>(p, pass, memory, x, sums, first_pass, inverse_rms);
      first_pass = false;
    }
    if (!paired) before += p.of[s].vectors;
  }
  __syncthreads();
  write_units<T, Warp::kVector, Warp::kValues>(p, memory.sums, begin, end - begin, y);
}

// Bytes of a table of residuals that is kept whole, before columns are: all blocks at once would ask L2 for the same
// few lines of it. None of one that is larger.
uint32_t small_residuals(const VptqGemv& p, uint32_t most, uint32_t entry_bytes) {
  const uint32_t whole = p.residuals * entry_bytes;
  return whole <= most / 16 ? whole : 0;
}

// Items of a window, of so many in all, as equal as windows can be. With several rows of x, whose columns take more of
// shared memory, windows leave L1 its share too; with one that costs more than it gains (README.md).
uint32_t window_items(uint32_t items, uint32_t most, uint32_t others, uint32_t item_bytes, int rows) {
  const uint32_t share = uint32_t(uint64_t(most) * kSharedPercent / 100);
  const uint32_t room = (rows > 1 && others + item_bytes <= share ? share : most) - others;
  const uint32_t fit = room / item_bytes, windows = (items + fit - 1) / fit;
  return (items + windows - 1) / windows;
}

// How much of both codebooks shared memory keeps beside `needed` of `most` bytes; `codes`: of a block that name one.
// Small residuals all, since they cost no sector then; of others what leaves L1 its share.
void plan_kept(VptqGemv& p, uint32_t most, uint32_t needed, uint64_t codes, uint32_t entry_bytes) {
  const uint32_t room = kept_of(most, needed, 1, most, entry_bytes);
  const uint32_t whole = p.count * entry_bytes, res_whole = p.residuals * entry_bytes;
  const bool main = worth_keeping(codes, p.count, entry_bytes);
  const bool residual = p.residuals != 0 && worth_keeping(codes, p.residuals, entry_bytes);
  const uint32_t share = (main ? room / 2 : room) / entry_bytes * entry_bytes;
  const bool all = small_residuals(p, most, entry_bytes) != 0 || res_whole < (most - needed) / 2 || res_whole < share;
  if (residual) p.res_kept = all ? res_whole : share;
  if (main) p.kept = kept_of(most, needed + p.res_kept, 1, whole, entry_bytes);
}

template <typename T, int kLanes, bool kResidual, int kRows>
void launch_vptq(VptqGemv p, const void* x, void* y, int device, cudaStream_t stream) {
  using Warp = VptqWarp<T, kLanes, kResidual, kRows>;
  const DeviceFacts& facts = device_facts(device, kOp);
  const bool paired = p.extras.activation != Activation::kNone;
  for (int s = 0; s < (paired ? 1 : p.segments); ++s) p.units += p.of[s].vectors, p.results += p.segment[s].out;
  const uint32_t grid = p.units < uint32_t(facts.multiprocessors) ? p.units : facts.multiprocessors;
  p.block_units = (p.units + grid - 1) / grid;
  const uint32_t unit_bytes = Warp::kValues * sizeof(float), fit = kShareBudget / (kRowWarps * unit_bytes);
  p.group = p.block_units < fit ? p.block_units : fit;
  const uint32_t most = uint32_t(facts.shared_bytes_per_block), column_bytes = 2 * sizeof(T) + kRows * sizeof(T);
  const uint32_t small = small_residuals(p, most, 2 * Warp::kVector);
  const uint64_t others = kRowWarps * sizeof(float) + small +
                          uint64_t((paired ? 2 : 1) * p.block_units + 2 * p.group * kRowWarps) * unit_bytes;
  require(others + Warp::kItem * column_bytes <= most, kOp, "out", p.results, "is too large for this device");
  p.items =
      window_items((p.in + Warp::kItem - 1) / Warp::kItem, most, uint32_t(others), Warp::kItem * column_bytes, kRows);
  p.window = p.items * Warp::kItem;
  const uint32_t needed = uint32_t(others) - small + p.window * column_bytes;
  plan_kept(p, most, needed, uint64_t(p.units) * p.in / grid, 2 * Warp::kVector);
  const uint32_t used = needed + p.kept + p.res_kept, alone = most / 2 + 1024;  // two of these are too many
  launch(kOp, device, LaunchWishes{1, true}, vptq_gemv_kernel<T, kLanes, kResidual, kRows>, grid, kRowThreads,
         used > alone ? used : alone, stream, p, static_cast<const T*>(x), y);
}

template <typename T, int kLanes>
void launch_rows(const VptqGemv& p, const void* x, void* y, int device, cudaStream_t stream) {
  if (p.residuals != 0 && p.rows == 1) return launch_vptq<T, kLanes, true, 1>(p, x, y, device, stream);
  if (p.residuals != 0) return launch_vptq<T, kLanes, true, 8>(p, x, y, device, stream);
  if (p.rows == 1) return launch_vptq<T, kLanes, false, 1>(p, x, y, device, stream);
  launch_vptq<T, kLanes, false, 8>(p, x, y, device, stream);
}

uint32_t bits_of(int64_t count) {
  uint32_t bits = 0;
  while (int64_t(1) << bits < count) ++bits;
  return bits;
}

bool begins_line(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

void check_matrix(const Vptq& w, const Vptq& first) {
  require(w.in == first.in, kOp, "in", w.in, "must be that of the first matrix");
  require(w.groups == 1 && w.group_size == w.in, kOp, "groups", w.groups, "must be 1, without outliers");
  require(w.vector_len == first.vector_len, kOp, "vector_len", w.vector_len, "must be that of the first matrix");
  require(w.count == first.count, kOp, "count", w.count, "must be that of the first matrix");
  require(w.residuals == first.residuals, kOp, "residuals", w.residuals, "must be those of the first matrix");
  require(w.words == first.words, kOp, "words", w.words, "must be those of the first matrix");
  require_aligned(w.indices, w.words != 0 ? 4 : 2, kOp, "indices");
  require_aligned(w.centroids, 16, kOp, "centroids");
  if (w.residuals != 0) require_aligned(w.res_centroids, 16, kOp, "res_centroids");
  if (w.residuals != 0 && w.words == 0) require_aligned(w.res_indices, 2, kOp, "res_indices");
  require((w.scale == nullptr) == (w.bias == nullptr), kOp, "bias", w.bias != nullptr,
          "must be given with scale alone");
}

void check_format(const Vptq& w) {
  require(w.vector_len == 8 || w.vector_len == 16, kOp, "vector_len", w.vector_len, "must be 8 or 16");
  require(w.in >= 8 && w.in % 8 == 0 && w.in <= 1 << 16, kOp, "in", w.in, "must be a multiple of 8, at most 65536");
  require(w.count >= 1 && w.count <= 1 << 16, kOp, "count", w.count, "must be from 1 to 65536");
  require(w.residuals >= 0 && w.residuals <= 1 << 16, kOp, "residuals", w.residuals, "must be from 0 to 65536");
  if (w.words == 0) return;
  const uint32_t bits = bits_of(w.count) + (w.residuals != 0 ? bits_of(w.residuals) : 0);
  require(bits >= 1 && bits <= 32, kOp, "bits", bits, "of packed indices must be from 1 to 32");
  require(w.words == (w.in * bits + 31) / 32, kOp, "words", w.words, "must be those of `in` indices");
}

}  // namespace

void vptq_gemv(const Vptq* matrices, int count, const GemvExtras& extras, const void* x, void* y, Type type, int rows,
               int device, cudaStream_t stream) {
  require(count >= 1 && count <= kMaxSegments, kOp, "matrices", count, "must be from 1 to 3");
  const Vptq& first = matrices[0];
  check_format(first);
  VptqGemv p = {};
  int64_t outs[kMaxSegments] = {};
  for (int i = 0; i < count; ++i) {
    const Vptq& w = matrices[i];
    check_matrix(w, first);
    outs[i] = w.out;
    p.segment[i] = {nullptr, nullptr, extras.bias[i], uint32_t(w.out), nullptr};
    p.of[i] = {static_cast<const uint8_t*>(w.indices),
               w.res_indices,
               static_cast<const uint8_t*>(w.centroids),
               static_cast<const uint8_t*>(w.res_centroids),
               w.places,
               w.scale,
               w.bias,
               uint32_t((w.out - 1) / w.vector_len + 1),
               w.places != nullptr && begins_line(w.places) && begins_line(w.scale) && begins_line(w.bias)};
  }
  check_row_gemv(kOp, outs, count, extras, x, y, type, rows);
  p.extras = extras;
  p.in = uint32_t(first.in), p.words = uint32_t(first.words);
  p.count = uint32_t(first.count), p.residuals = uint32_t(first.residuals);
  p.main_bits = bits_of(first.count), p.bits = p.main_bits + (first.residuals != 0 ? bits_of(first.residuals) : 0);
  p.rows = rows, p.segments = count;
  const DeviceGuard guard(device, kOp);
  const bool half = type == Type::kFloat16, eight = first.vector_len == 8;
  if (half && eight) return launch_rows<__half, 1>(p, x, y, device, stream);
  if (half) return launch_rows<__half, 2>(p, x, y, device, stream);
  if (eight) return launch_rows<__nv_bfloat16, 1>(p, x, y, device, stream);
  launch_rows<__nv_bfloat16, 2>(p, x, y, device, stream);
}

}  // namespace localq
