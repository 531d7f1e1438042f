// Attention of one token over the KV cache, in one launch: norm of q and k, rotation, the write of k and v, softmax.
//
//   q, k = rotate(norm(q), norm(k));  cache[position] = k, v;  out = softmax(cap(scale q K^T)) V per head
//   K, V: slots max(0, position + 1 - window) .. position; cap(x) = softcap tanh(x / softcap)
//
// Shapes: attention.h; codes of 8 and 4 bit: kv_codes.cuh. Heads of a group share k and v: each byte of the cache is
// read once for all of them, or, where they are more than 8 and head_dim is at most 64 or above 128, twice.
//
// Who owns what. grid (splits, kv_heads * passes), 4 warps a block. The slots before `position` are cut into as many
// equal splits of whole 64-slot pieces as there are blocks for, so the cost follows the live length although the grid
// is fixed; blocks without a split leave at once. A warp takes every fourth tile of 16 slots straight into registers:
//   S [16 heads, 8 slots] = Q K^T   m16n8k16, Q from shared memory, K as loaded: the order of the columns is free
//   O^T [16 columns, 8 heads] += V^T P^T   pairs of slots joined by byte permutes; P stays where S left it
// The four warps, and then the splits, are joined with their largest scores in a fixed order: same input, same bits.
// The block that arrives last joins the splits of its kv head and sets the counter back to zero.
// The token's own k and v never come from memory: the last split adds them as one more partial result, in the form in
// which later steps will read them. A split before has nothing to wait for but its slots.
//
// Before the dependency wait, the position of the step before serves as a hint of what to bring into L2.
// Bound: memory, and for short contexts latency: position -> slots -> S -> O -> join.
#include "attention.h"
#include "attention_block.cuh"
#include "attention_join.cuh"
#include "attention_tiles.cuh"
#include "attention_token.cuh"
#include "kv_codes.cuh"
#include "launch.h"

namespace localq {

using namespace decoding;

namespace {

__device__ __forceinline__ void prefetch_bytes(const void* from, int64_t first, int64_t count) {
  for (int64_t at = 128 * threadIdx.x; at < count; at += 128 * kThreads) {
    prefetch(static_cast<const uint8_t*>(from) + first + at);
  }
}

// Brings what the block will read first into L2, as the position of the step before (or already this one's) tells it.
__device__ __forceinline__ void prefetch_slots(const Arguments& a, int kv_head) {
  const int64_t hint = fresh_load(a.step.position);
  if (hint < 0 || hint >= a.layer.capacity) return;
  Range whole;
  const Range mine = split_range(int(hint), a.step.window, a.step.splits, blockIdx.x, &whole);
  const int64_t slot = int64_t(kv_head) * a.layer.capacity + mine.first, slots = min(mine.count, kPiece);
  const int64_t row_bytes = a.layer.head_dim * a.layer.bits / 8;
  prefetch_bytes(a.layer.k, slot * row_bytes, slots * row_bytes);
  prefetch_bytes(a.layer.v, slot * row_bytes, slots * row_bytes);
  if (a.layer.bits == 16) return;
  const int64_t scale_bytes = 2 * scales_of(a.layer.head_dim);
  prefetch_bytes(a.layer.k_scales, slot * scale_bytes, slots * scale_bytes);
  prefetch_bytes(a.layer.v_scales, slot * scale_bytes, slots * scale_bytes);
}

template <typename T, int kBits, int kDim, int kHeadTiles>
__global__ void __launch_bounds__(kThreads, kDim == 64                 ? 5
                                            : kDim * kHeadTiles == 128 ? 3
                                                                       : 2) attention_decode_kernel(const Arguments a) {
  __shared__ Shared<kDim, kHeadTiles> shared;
  constexpr bool kAhead = kDim < 256 || kBits != 8;  // k of the next tile while this one is worked on; else spills
  const int kv_head = blockIdx.y / a.passes, pass = blockIdx.y % a.passes;
  const int group = a.step.heads / a.layer.kv_heads;
  const int first_head = kv_head * group + pass * 8 * kHeadTiles;
  const int heads = min(8 * kHeadTiles, group - pass * 8 * kHeadTiles);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, split = blockIdx.x;
  release_dependents();
  Tables<kDim> tables;
  tables.load_weights(a, lane);
  prefetch_slots(a, kv_head);
  dependency_wait();

  const int position = int(fresh_load(a.step.position));
  stage_rows(shared, a, kv_head, first_head, heads);
  Range whole;
  const Range mine = split_range(position, a.step.window, a.step.splits, split, &whole);
  if (split >= whole.splits) return;  // the whole block leaves
  const bool own = split == whole.splits - 1;

  Warp<T, kBits, kDim, kHeadTiles> state;
  const int64_t base = int64_t(kv_head) * a.layer.capacity + mine.first;
  const int tiles = ceil_div(mine.count, kTile);
  if (warp < tiles) {
    if (kAhead) state.load_k(a.layer, base, warp, mine.count, lane);
    state.load_v(a.layer, base, warp, mine.count, lane);
  }
  tables.load_turns(a, position, lane);
  __syncthreads();
  prepare_token<T, kBits>(shared, a, kv_head, heads, position, own, pass == 0, tables);
  __syncthreads();
  if (own) score_own<T>(shared, a, heads);

#pragma unroll
  for (int h = 0; h < kHeadTiles; ++h) {
    state.largest[h] = kNegInf, state.sum[h] = 0.f;
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) state.o[h][i][0] = state.o[h][i][1] = state.o[h][i][2] = state.o[h][i][3] = 0.f;
  }
  for (int tile = warp; tile < tiles; tile += kWarps) {
    const int next = tile + kWarps;
    float s[2][4] = {};
    unsigned p[kHeadTiles][2];
    if (!kAhead) state.load_k(a.layer, base, tile, mine.count, lane);
    state.products(s, shared, lane);
    if (kAhead && next < tiles) state.load_k(a.layer, base, next, mine.count, lane);
    state.soften(p, s, a.step, tile, mine.count, lane);
    state.accumulate(p, lane);
    if (next < tiles) state.load_v(a.layer, base, next, mine.count, lane);
  }
  __syncthreads();  // Q makes room for the results
  state.leave(shared, warp, lane);
  __syncthreads();
  join_warps(shared, heads, own);

  if (whole.splits > 1) {
    const int64_t place = int64_t(blockIdx.y) * a.step.splits * 8 * kHeadTiles;
    const int64_t rows = int64_t(gridDim.y) * a.step.splits * 8 * kHeadTiles;
    const Partials partials = {a.step.partials + place * kDim,
                               reinterpret_cast<float2*>(a.step.partials + rows * kDim) + place};
    if (!deliver(shared, partials, a.step.arrived + blockIdx.y, heads, split, whole.splits)) return;
    join_splits(shared, partials, heads, whole.splits);
  }
  finish(shared, a, first_head, heads, kBits != 16);
}

template <typename T, int kBits, int kDim, int kHeadTiles>
void start(const Arguments& a, int device, cudaStream_t stream) {
  const dim3 grid(a.step.splits, a.layer.kv_heads * a.passes);
  launch("attention_decode", device, attention_decode_kernel<T, kBits, kDim, kHeadTiles>, grid, kThreads, 0, stream, a);
}

template <typename T, int kBits>
void start_sized(Arguments& a, int device, cudaStream_t stream) {
  const int group = a.step.heads / a.layer.kv_heads;
  const bool two = group > 8 && a.layer.head_dim > 64 && a.layer.head_dim <= 128;
  a.passes = two ? 1 : (group + 7) / 8;
  if (two) return start<T, kBits, 128, 2>(a, device, stream);
  if (a.layer.head_dim <= 64) return start<T, kBits, 64, 1>(a, device, stream);
  if (a.layer.head_dim <= 128) return start<T, kBits, 128, 1>(a, device, stream);
  return start<T, kBits, 256, 1>(a, device, stream);
}

void check(const AttentionStep& step, const KvLayer& layer, Type type) {
  const char* op = "attention_decode";
  require(type != Type::kFloat32, op, "dtype", int(type), "must be float16 or bfloat16");
  require(layer.bits == 16 || layer.bits == 8 || layer.bits == 4, op, "bits", layer.bits, "must be 16, 8 or 4");
  require(layer.head_dim >= 8 && layer.head_dim <= 256 && layer.head_dim % 8 == 0, op, "head_dim", layer.head_dim,
          "must be a multiple of 8 up to 256");
  require(layer.kv_heads > 0, op, "kv_heads", layer.kv_heads, "must be positive");
  require(step.heads % layer.kv_heads == 0, op, "heads", step.heads, "must be a multiple of kv_heads");
  const int group = step.heads / layer.kv_heads;
  require(group >= 1 && group <= 16, op, "heads", step.heads, "must be 1 to 16 per kv head");
  require(layer.capacity > 0 && layer.capacity < 1 << 30, op, "capacity", layer.capacity, "must be below 2^30");
  require(
      step.rotary == nullptr || (step.rotary_dim > 0 && step.rotary_dim % 2 == 0 && step.rotary_dim <= layer.head_dim),
      op, "rotary_dim", step.rotary_dim, "must be even and at most head_dim");
  require(step.window >= 0, op, "window", step.window, "must not be negative");
  require(step.splits >= 1 && step.splits <= kMaxSplits, op, "splits", step.splits, "must be from 1 to 64");
  require_aligned(step.qkv, 16, op, "qkv");
  require_aligned(step.position, 8, op, "position");
  require_aligned(step.out, 2, op, "out");
  require_aligned(step.partials, 16, op, "partials");
  require_aligned(step.arrived, 4, op, "arrived");
  require_aligned(layer.k, 16, op, "k");
  require_aligned(layer.v, 16, op, "v");
  if (layer.bits != 16) {
    require_aligned(layer.k_scales, 16, op, "k_scales");
    require_aligned(layer.v_scales, 16, op, "v_scales");
  }
}

}  // namespace

int attention_splits(int kv_heads, int device) {
  require(kv_heads > 0, "attention_splits", "kv_heads", kv_heads, "must be positive");
  const int blocks = 2 * device_facts(device, "attention_splits").multiprocessors;
  return blocks / kv_heads < 1 ? 1 : blocks / kv_heads > kMaxSplits ? kMaxSplits : blocks / kv_heads;
}

int64_t attention_partials(int heads, int kv_heads, int head_dim, int splits) {
  const int columns = head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256;
  const int group = heads / kv_heads;
  const int64_t rows = int64_t(kv_heads) * (group > 8 ? 16 : 8) * splits;
  return rows * (columns + 2);  // two facts per row
}

void attention_decode(const AttentionStep& step, const KvLayer& layer, Type type, int device, cudaStream_t stream) {
  check(step, layer, type);
  const DeviceGuard guard(device, "attention_decode");
  Arguments a = {step, layer, type == Type::kBFloat16, 1};
  if (step.rotary == nullptr) a.step.rotary_dim = 0;
  if (layer.bits == 8) return start_sized<__half, 8>(a, device, stream);
  if (layer.bits == 4) return start_sized<__half, 4>(a, device, stream);
  if (a.bf16) return start_sized<__nv_bfloat16, 16>(a, device, stream);
  return start_sized<__half, 16>(a, device, stream);
}

}  // namespace localq
