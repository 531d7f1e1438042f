// Attention of one token over the KV cache, in one launch: norm of q and k, rotation, the write of k and v, softmax.
// Of some consecutive tokens (rows): their k and v are written by one launch, then each is a token of its own, one z of
// the grid, which reads those before it from the cache.
//
//   q, k = rotate(norm(q), norm(k));  cache[slot] = k, v;  out = softmax(cap(scale q K^T)) V per head
//   slot = position - base; K, V: slots max(0, slot + 1 - window) .. slot; cap(x) = softcap tanh(x / softcap)
//   with sinks: the softmax of a head has one more score, its sink, which has no value
//   with a gate: out, rounded, times its sigmoid
//
// Shapes: attention.h; 8- and 4-bit codes: kv_codes.cuh. Heads of a group share k and v: each byte of the cache is read
// once for all of them, or twice if they are more than 8 and head_dim is at most 64 or above 128. Above 256 columns
// a warp loads k and v in parts where it uses them, as its registers hold the result alone.
//
// Work distribution. grid (splits, kv_heads * passes, rows), 4 warps per block, 8 blocks per cluster from compute
// capability 9.0. The slots before the token's are divided into equal splits of whole 64-slot pieces: within one
// cluster up to 4 pieces per block, else over all, so the cost follows the live length although the grid is fixed;
// clusters without a split exit at once. A warp loads every fourth tile of 16 slots directly into registers:
//   S [16 heads, 8 slots] = Q K^T   m16n8k16, Q from shared memory, K as loaded: the order of the columns is free
//   O^T [16 columns, 8 heads] += V^T P^T   pairs of slots combined by byte permutes; P stays in the registers of S
// Warps, blocks of a cluster, and clusters are combined by their largest scores, each in a fixed order: deterministic
// (combine.cuh). The current token's k and v do not go through memory: the last split (an idle block of the cluster, if
// there is one) adds them as one more partial result, in the form in which later steps read them. The other splits
// depend only on their slots.
//
// Before the dependency wait the first slots are loaded for the position in memory, which is this step's or the
// previous one's: the slots before either were written by steps that have ended. If it was the previous one's, or the
// base another, they are loaded again. Rows behind the first see slots that the launch before writes: nothing is loaded
// for them before the wait. Bound: memory; for short contexts latency: position -> slots -> S -> O ->
// combine.
#include <algorithm>

#include "attention/attention.h"
#include "attention/combine.cuh"
#include "attention/decode.cuh"
#include "attention/intrinsics.cuh"
#include "attention/kv_codes.cuh"
#include "attention/qkv.cuh"
#include "attention/tiles.cuh"
#include "common/launch.h"

namespace localq {

using namespace decoding;

namespace {

// Prefetches bytes [first, first + count) to L2.
__device__ __forceinline__ void prefetch_bytes(const void* from, int64_t first, int64_t count) {
  for (int64_t at = 128 * threadIdx.x; at < count; at += 128 * kThreads) {
    prefetch(static_cast<const uint8_t*>(from) + first + at);
  }
}

// Prefetches what follows the first piece of the block, as far as it is read soon.
template <int kKeyBits, int kValueBits>
__device__ __forceinline__ void prefetch_slots(const KvLayer& layer, int64_t base, int count) {
  const int64_t slot = base + kPiece, slots = min(count, kPiece * kAlone) - kPiece;
  const int64_t key_bytes = layer.head_dim * layer.key_bits / 8, value_bytes = key_bytes * kValueBits / kKeyBits;
  prefetch_bytes(layer.k, slot * key_bytes, slots * key_bytes);
  prefetch_bytes(layer.v, slot * value_bytes, slots * value_bytes);
  if (layer.key_bits == 16) return;
  const int64_t scale_bytes = 2 * scales_of(layer.head_dim);
  prefetch_bytes(layer.k_scales, slot * scale_bytes, slots * scale_bytes);
  prefetch_bytes(layer.v_scales, slot * scale_bytes, slots * scale_bytes);
}

// The position of slot 0.
__device__ __forceinline__ int base_of(const AttentionStep& step) {
  return step.base == nullptr ? 0 : int(fresh_load(step.base));
}

// The block's rank in its cluster, its heads and its slots; valid once `base` and `slot`, the token's, are.
struct Place {
  int kv_head, pass, first_head, heads, rank;
  int base, slot;
  Share mine;

  __device__ __forceinline__ Place(const Arguments& a, int most_heads) {
    const int group = a.step.heads / a.layer.kv_heads;
    kv_head = blockIdx.y / a.passes, pass = blockIdx.y % a.passes;
    first_head = kv_head * group + pass * most_heads;
    heads = min(most_heads, group - pass * most_heads);
    rank = blockIdx.x & ((1 << a.rank_bits) - 1);
  }
};

// Loads what depends on the position, only from slots before the token's.
template <typename W, int kDim>
__device__ __forceinline__ void begin(Place& at, W& state, Tables<kDim>& tables, const Arguments& a, bool ahead) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  at.mine = share_of(a, at.slot, blockIdx.x);
  const int64_t base = int64_t(at.kv_head) * a.layer.capacity + at.mine.first;
  if (!kInParts<kDim> && warp * kTile < at.mine.count) {
    if (ahead) state.load_k(a.layer, base, warp, at.mine.count, lane);
    state.load_v(a.layer, base, warp, at.mine.count, lane);
  }
  tables.load_turns(a, at.base + at.slot, lane);
}

// The warp's tiles in order; the loads of the next are in flight during the current one.
template <bool kAhead, typename W, typename S>
__device__ __forceinline__ void work(W& state, S& shared, const Arguments& a, const Place& at) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, count = at.mine.count, tiles = ceil_div(count, kTile);
  const int64_t base = int64_t(at.kv_head) * a.layer.capacity + at.mine.first;
  state.clear();
  for (int tile = warp; tile < tiles; tile += kWarps) {
    const int next = tile + kWarps;
    float s[2][4] = {};
    unsigned p[W::kTiles][2];
    if constexpr (kInParts<32 * W::kBlocks>) {
      state.products_in_parts(s, shared, a.layer, base, tile, count, lane);
      state.soften(p, s, a.step, tile, count, lane);
      state.accumulate_in_parts(p, a.layer, base, tile, count, lane);
    } else {
      if (!kAhead) state.load_k(a.layer, base, tile, count, lane);
      state.products(s, shared, lane);
      if (kAhead && next < tiles) state.load_k(a.layer, base, next, count, lane);
      state.soften(p, s, a.step, tile, count, lane);
      state.accumulate(p, lane);
      if (next < tiles) state.load_v(a.layer, base, next, count, lane);
    }
  }
  state.leave(shared, warp, lane);
}

template <typename S, bool kDynamic>
__device__ __forceinline__ S& memory_of_block() {
  if constexpr (kDynamic) {
    return launched_memory<S>();
  } else {
    return block_memory<S>();
  }
}

template <typename T, int kKeyBits, int kValueBits, int kDim, int kHeadTiles>
__global__ void __launch_bounds__(kThreads, kDim == 64                 ? 5
                                            : kDim * kHeadTiles == 128 ? 3
                                            : kInParts<kDim>           ? 1
                                                                       : 2) attention_decode_kernel(const Arguments a) {
  auto& shared = memory_of_block<Shared<kDim, kHeadTiles>, kInParts<kDim>>();
  constexpr bool kAhead = kDim < 256 || kKeyBits != 8;  // k of the next tile in flight; otherwise spills
  release_dependents();
  cluster_arrive();  // senders must know that this block has started
  Place at(a, 8 * kHeadTiles);
  Warp<T, kKeyBits, kValueBits, kDim, kHeadTiles> state;
  Tables<kDim> tables;
  at.base = base_of(a.step);
  at.slot = -1;
  if (blockIdx.z == 0) {
    const int64_t hint = acquire_load(a.step.position) - at.base;
    at.slot = hint >= 0 && hint < a.layer.capacity ? int(hint) : 0;
    begin(at, state, tables, a, kAhead);
    const int64_t first = int64_t(at.kv_head) * a.layer.capacity + at.mine.first;
    prefetch_slots<kKeyBits, kValueBits>(a.layer, first, at.mine.count);
  }
  tables.load_weights(shared.weight, a, threadIdx.x % 32);
  const float sink = load_sink(a, at.first_head, at.heads);
  clear_q(shared, at.heads);
  dependency_wait();

  const int base = base_of(a.step), slot = int(fresh_load(a.step.position)) - base + int(blockIdx.z);
  stage_rows(shared, a, at.kv_head, at.first_head, at.heads);
  if (threadIdx.x < 8 * kHeadTiles) shared.sink[threadIdx.x] = sink;
  if (slot != at.slot || base != at.base) {
    at.base = base, at.slot = slot;
    begin(at, state, tables, a, kAhead);
  }
  const int split = blockIdx.x, own = at.mine.own;
  if (split >> a.rank_bits > own >> a.rank_bits) return;  // the whole cluster exits
  if (split <= own) {
    __syncthreads();
    const bool writes = at.pass == 0 && gridDim.z == 1;
    prepare_token<T, kKeyBits, kValueBits>(shared, a, at.kv_head, at.heads, slot, split == own, writes, tables);
    __syncthreads();
    if (split == own) score_own<T>(shared, a, at.heads);
    work<kAhead>(state, shared, a, at);
    __syncthreads();
  }
  // Loaded here, it arrives while results are sent, and takes no register from the loop over tiles; its sigmoid is
  // ready when those of others have come.
  const uint2 gate = load_gate<kDim>(a, at.first_head, at.heads, (threadIdx.x / 8 << a.rank_bits) + at.rank);
  cluster_wait();
  if (split <= own) send(shared, at.heads, a.rank_bits, at.rank, split == own);
  cluster_arrive();
  const float4 sigmoid = sigmoid_of(gate, a);
  cluster_wait();
  receive(shared, a, at.first_head, at.heads, at.rank, own, sigmoid);
}

// The keys and values of several rows, one block for each row and kv head.
template <int kKeyBits, int kValueBits, int kDim>
__global__ void __launch_bounds__(kThreads, 1) attention_write_kernel(const Arguments a) {
  auto& shared = block_memory<Written<kDim>>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, kv_head = blockIdx.y;
  release_dependents();
  Tables<kDim> tables;
  tables.load_weights(shared.weight, a, lane);
  dependency_wait();
  const int64_t position = fresh_load(a.step.position) + blockIdx.z;
  const int64_t slot = int64_t(kv_head) * a.layer.capacity + position - base_of(a.step);
  const int chunks = a.layer.head_dim / 8;
  const uint4* kv = row_of(a) + a.step.heads * (a.step.q_stride / 8);
  for (int i = threadIdx.x; i < 2 * chunks; i += kThreads) {
    const uint4* from = kv + int64_t(kv_head + i / chunks * a.layer.kv_heads) * chunks;
    *reinterpret_cast<uint4*>(&shared.row[i / chunks][i % chunks * 8]) = __ldcg(from + i % chunks);
  }
  tables.load_turns(a, int(position), lane);
  __syncthreads();
  float x[kDim / 32];
  if (warp == 0) {
    prepare<kDim>(x, shared.row[0], a, true, tables, shared.weight, lane);
    write_own<kDim, kKeyBits>(x, shared.fresh[0], a, a.layer.k, a.layer.k_scales, slot, true, lane);
  } else if (warp == 1) {
    read_row<kDim>(x, shared.row[1], a, lane);
    write_own<kDim, kValueBits>(x, shared.fresh[1], a, a.layer.v, a.layer.v_scales, slot, true, lane);
  }
}

// Clusters of 2^rank_bits blocks that are resident at once, so that none waits for others to end.
template <typename Kernel>
int clusters_held(Kernel kernel, int rank_bits, size_t bytes, int device) {
  const char* op = "attention_decode";
  int count = 0;
  if (bytes > 0) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)), op);
  }
  if (rank_bits == 0) {
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, kThreads, bytes), op);
    return count * device_facts(device, op).multiprocessors;
  }
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = 1u << rank_bits, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1u << rank_bits), config.blockDim = kThreads, config.dynamicSmemBytes = bytes;
  config.attrs = &attribute, config.numAttrs = 1;
  check_cuda(cudaOccupancyMaxActiveClusters(&count, kernel, &config), op);
  return count;
}

template <typename T, int kKeyBits, int kValueBits, int kDim, int kHeadTiles>
void start(Arguments a, int device, cudaStream_t stream) {
  static int held[kMostDevices][2] = {};  // cached; racing threads write the same value
  const auto kernel = attention_decode_kernel<T, kKeyBits, kValueBits, kDim, kHeadTiles>;
  const DeviceFacts& facts = device_facts(device, "attention_decode");
  const bool clusters = facts.clusters && a.step.splits % kRanks == 0;
  a.rank_bits = clusters ? kRankBits : 0;
  constexpr size_t bytes = kInParts<kDim> ? sizeof(Shared<kDim, kHeadTiles>) : 0;
  int& most = held[device][clusters];
  if (most == 0) most = std::max(1, clusters_held(kernel, a.rank_bits, bytes, device));
  const int groups = a.layer.kv_heads * a.passes, rows = a.step.rows;
  a.step.splits = std::min(a.step.splits >> a.rank_bits, std::max(1, most / (groups * rows))) << a.rank_bits;
  if (rows > 1) {
    const auto write = attention_write_kernel<kKeyBits, kValueBits, kDim>;
    launch("attention_decode", device, {}, write, dim3(1, a.layer.kv_heads, rows), kThreads, 0, stream, a);
  }
  const dim3 grid(a.step.splits, groups, rows);
  launch("attention_decode", device, {1 << a.rank_bits}, kernel, grid, kThreads, bytes, stream, a);
}

template <typename T, int kKeyBits, int kValueBits = kKeyBits>
void start_sized(Arguments& a, int device, cudaStream_t stream) {
  const int group = a.step.heads / a.layer.kv_heads;
  const bool two = group > 8 && a.layer.head_dim > 64 && a.layer.head_dim <= 128;
  a.passes = two ? 1 : (group + 7) / 8;
  if (two) return start<T, kKeyBits, kValueBits, 128, 2>(a, device, stream);
  if (a.layer.head_dim <= 64) return start<T, kKeyBits, kValueBits, 64, 1>(a, device, stream);
  if (a.layer.head_dim <= 128) return start<T, kKeyBits, kValueBits, 128, 1>(a, device, stream);
  if constexpr (kKeyBits == 16) {
    if (a.layer.head_dim > 256) return start<T, kKeyBits, kValueBits, 512, 1>(a, device, stream);
  }
  return start<T, kKeyBits, kValueBits, 256, 1>(a, device, stream);
}

void check(const AttentionStep& step, const KvLayer& layer, Type type) {
  const char* op = "attention_decode";
  require(type != Type::kFloat32, op, "dtype", int(type), "must be float16 or bfloat16");
  const int key_bits = layer.key_bits, value_bits = layer.value_bits;
  require(key_bits == 16 || key_bits == 8 || key_bits == 4, op, "key_bits", key_bits, "must be 16, 8 or 4");
  require(value_bits == key_bits || (key_bits == 8 && value_bits == 4), op, "value_bits", value_bits,
          "must be key_bits, or 4 if key_bits is 8");
  const int most = key_bits == 16 ? 512 : 256;
  require(layer.head_dim >= 8 && layer.head_dim <= most && layer.head_dim % 8 == 0, op, "head_dim", layer.head_dim,
          key_bits == 16 ? "must be a multiple of 8 up to 512" : "must be a multiple of 8 up to 256 below 16 bits");
  require(layer.kv_heads > 0, op, "kv_heads", layer.kv_heads, "must be positive");
  require(step.heads % layer.kv_heads == 0, op, "heads", step.heads, "must be a multiple of kv_heads");
  const int group = step.heads / layer.kv_heads;
  require(group >= 1 && group <= 16, op, "heads", step.heads, "must be 1 to 16 per kv head");
  require(layer.capacity > 0 && layer.capacity < 1 << 30, op, "capacity", layer.capacity, "must be below 2^30");
  require(
      step.rotary == nullptr || (step.rotary_dim > 0 && step.rotary_dim % 2 == 0 && step.rotary_dim <= layer.head_dim),
      op, "rotary_dim", step.rotary_dim, "must be even and at most head_dim");
  require(step.rows >= 1 && step.rows <= kMostRows, op, "rows", step.rows, "must be from 1 to 8");
  require(step.window >= 0, op, "window", step.window, "must not be negative");
  require(step.splits >= 1 && step.splits <= kMaxSplits, op, "splits", step.splits, "must be from 1 to 64");
  require(step.q_stride >= layer.head_dim && step.q_stride % 8 == 0, op, "q_stride", step.q_stride,
          "must be a multiple of 8, at least head_dim");
  require_aligned(step.qkv, 16, op, "qkv");
  require_aligned(step.position, 8, op, "position");
  if (step.base != nullptr) require_aligned(step.base, 8, op, "base");
  require_aligned(step.out, 8, op, "out");
  if (step.gate != nullptr) {
    require(step.gate_stride >= layer.head_dim && step.gate_stride % 4 == 0, op, "gate_stride", step.gate_stride,
            "must be a multiple of 4, at least head_dim");
    require(step.gate_row_stride % 4 == 0, op, "gate_row_stride", step.gate_row_stride, "must be a multiple of 4");
    require_aligned(step.gate, 8, op, "gate");
  }
  if (step.sinks != nullptr) require_aligned(step.sinks, 2, op, "sinks");
  require_aligned(step.partials, 16, op, "partials");
  require_aligned(step.arrived, 4, op, "arrived");
  require_aligned(layer.k, 16, op, "k");
  require_aligned(layer.v, 16, op, "v");
  if (key_bits != 16) {
    require_aligned(layer.k_scales, 16, op, "k_scales");
    require_aligned(layer.v_scales, 16, op, "v_scales");
  }
}

}  // namespace

int attention_splits(int kv_heads, int device) {
  require(kv_heads > 0, "attention_splits", "kv_heads", kv_heads, "must be positive");
  const DeviceFacts& facts = device_facts(device, "attention_splits");
  const int ranks = facts.clusters ? kRanks : 1;
  return std::clamp(3 * facts.multiprocessors / kv_heads / ranks * ranks, ranks, kMaxSplits);
}

int64_t attention_partials(int heads, int kv_heads, int head_dim, int splits) {
  const int columns = head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : head_dim <= 256 ? 256 : 512;
  const int group = heads / kv_heads;
  const int64_t rows = int64_t(kv_heads) * (group > 8 ? 16 : 8) * splits;
  return rows * (columns + columns / 16);  // two facts per 32 columns
}

void attention_decode(const AttentionStep& step, const KvLayer& layer, Type type, int device, cudaStream_t stream) {
  check(step, layer, type);
  const DeviceGuard guard(device, "attention_decode");
  Arguments a = {step, layer, type == Type::kBFloat16, 1, 0};
  if (step.rotary == nullptr) a.step.rotary_dim = 0;
  if (layer.value_bits != layer.key_bits) return start_sized<__half, 8, 4>(a, device, stream);
  if (layer.key_bits == 8) return start_sized<__half, 8>(a, device, stream);
  if (layer.key_bits == 4) return start_sized<__half, 4>(a, device, stream);
  if (a.bf16) return start_sized<__nv_bfloat16, 16>(a, device, stream);
  return start_sized<__half, 16>(a, device, stream);
}

}  // namespace localq
