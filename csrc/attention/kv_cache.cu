// The quantized KV cache for prefill: stores many tokens, reads the live slots. Format: kv_codes.cuh.
//
//   kv_write  codes and scales of k, v T [tokens, kv_heads, head_dim] at slots i64 [tokens]
//             One warp per block of 32 elements, one element per lane. Bound: latency; a chunk is a few MB.
//   kv_read   k, v T [kv_heads, live, head_dim] = the first `live` slots, Hadamard rotation undone, rounded once
//             One thread per 8 elements. Bound: memory, bits / 8 + 2 bytes per element.
#include "attention/attention.h"
#include "attention/kv_codes.cuh"
#include "common/launch.h"

namespace localq {
namespace {

constexpr int kThreads = 256;

struct Rows {  // k or v: the stored form, and the dense rows read or written
  uint8_t* codes;
  __half* scales;
  void* dense;
  int64_t token_stride;
};

struct Arguments {
  Rows rows[2];
  const int64_t* slots;
  int bits, kv_heads, head_dim;
  int64_t capacity, count;  // tokens, or live slots
};

template <typename T>
__global__ void __launch_bounds__(kThreads) kv_write_kernel(const Arguments a) {
  release_dependents();
  dependency_wait();
  const int lane = threadIdx.x % 32, blocks = scales_of(a.head_dim);  // blocks without elements get a scale of 0
  const int64_t warp = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / 32;
  const int64_t vector = warp / blocks;
  const int block = int(warp % blocks), first = kKvBlock * block, size = max(0, min(kKvBlock, a.head_dim - first));
  const int64_t token = vector / a.kv_heads;
  if (token >= a.count) return;  // the whole warp
  const int head = int(vector % a.kv_heads);
  const Rows rows = blockIdx.y == 0 ? a.rows[0] : a.rows[1];  // indexing would copy it to local memory
  const T* dense = static_cast<const T*>(rows.dense) + token * rows.token_stride + int64_t(head) * a.head_dim;
  float x[1] = {lane < size ? float(dense[first + lane]) : 0.f};
  Code code[1];
  turn(x, hadamard_width(a.head_dim), lane);
  encode(code, x, a.bits, lane);
  const int64_t slot = head * a.capacity + a.slots[token];
  store_codes(rows.codes + slot * (a.head_dim * a.bits / 8), first, lane, size, code[0].code, a.bits);
  if (lane == 0) rows.scales[slot * blocks + scale_place(block, blocks)] = __float2half_rn(code[0].scale);
}

__device__ __forceinline__ void turn_eight(float (&x)[8], int width, int lane) {
#pragma unroll
  for (int step = 1; step < 8; step *= 2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i & step) continue;
      const float low = x[i], high = x[i + step];
      x[i] = low + high, x[i + step] = low - high;
    }
  }
  for (int step = 1; step < width / 8; step *= 2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float other = __shfl_xor_sync(~0u, x[i], step);
      x[i] = lane & step ? other - x[i] : x[i] + other;
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) kv_read_kernel(const Arguments a) {
  release_dependents();
  dependency_wait();
  const int chunks = a.head_dim / 8, lane = threadIdx.x % 32, scales = scales_of(a.head_dim);
  const int64_t all = a.kv_heads * a.count * chunks;
  const int64_t mine = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t index = min(mine, all - 1);  // lanes past the end still take part in the shuffles
  const int64_t vector = index / chunks;
  const int chunk = int(index % chunks);
  const int64_t slot = vector / a.count * a.capacity + vector % a.count;
  const Rows rows = blockIdx.y == 0 ? a.rows[0] : a.rows[1];  // indexing would copy it to local memory
  const uint8_t* codes = rows.codes + slot * (a.head_dim * a.bits / 8) + chunk * a.bits;
  const Pairs pairs = a.bits == 8 ? decode_pairs(*reinterpret_cast<const uint2*>(codes))
                                  : decode_pairs(*reinterpret_cast<const unsigned*>(codes));
  const int width = hadamard_width(a.head_dim);
  const float scale = __half2float(rows.scales[slot * scales + scale_place(chunk / 4, scales)]);
  float x[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&pairs.pair[i]));
    x[2 * i] = scale * pair.x, x[2 * i + 1] = scale * pair.y;
  }
  turn_eight(x, width, lane);
  if (mine >= all) return;
  struct alignas(8 * sizeof(T)) {
    T value[8];
  } out;
#pragma unroll
  for (int i = 0; i < 8; ++i) out.value[i] = T(x[i] * hadamard_scale(width));
  reinterpret_cast<decltype(out)*>(rows.dense)[mine] = out;
}

void check(const KvLayer& layer, Type type, const char* op) {
  require(type != Type::kFloat32, op, "dtype", int(type), "must be float16 or bfloat16");
  const int key_bits = layer.key_bits, value_bits = layer.value_bits;
  require(key_bits == 8 || key_bits == 4, op, "key_bits", key_bits, "must be 8 or 4");
  require(value_bits == key_bits || value_bits == 4, op, "value_bits", value_bits,
          "must be key_bits, or 4 if key_bits is 8");
  require(layer.head_dim >= 8 && layer.head_dim <= 256 && layer.head_dim % 8 == 0, op, "head_dim", layer.head_dim,
          "must be a multiple of 8 up to 256");
  require(layer.kv_heads > 0, op, "kv_heads", layer.kv_heads, "must be positive");
  require_aligned(layer.k, 16, op, "k");
  require_aligned(layer.v, 16, op, "v");
  require_aligned(layer.k_scales, 16, op, "k_scales");
  require_aligned(layer.v_scales, 16, op, "v_scales");
}

Arguments arguments(const KvLayer& layer, const void* k, const void* v, int64_t count) {
  Arguments a = {};
  a.rows[0] = {static_cast<uint8_t*>(layer.k), static_cast<__half*>(layer.k_scales), const_cast<void*>(k), 0};
  a.rows[1] = {static_cast<uint8_t*>(layer.v), static_cast<__half*>(layer.v_scales), const_cast<void*>(v), 0};
  a.bits = layer.key_bits, a.kv_heads = layer.kv_heads, a.head_dim = layer.head_dim;
  a.capacity = layer.capacity, a.count = count;
  return a;
}

// One launch for keys and values, or one for each if their bits differ.
void launch_rows(const char* op, int device, void (*kernel)(Arguments), int64_t threads, cudaStream_t stream,
                 Arguments a, int value_bits) {
  const int64_t blocks = (threads + kThreads - 1) / kThreads;
  require(blocks < int64_t(1) << 31, op, "blocks", blocks, "are too many");
  const bool together = value_bits == a.bits;
  launch(op, device, kernel, dim3(unsigned(blocks), together ? 2 : 1), kThreads, 0, stream, a);
  if (together) return;
  a.rows[0] = a.rows[1], a.bits = value_bits;
  launch(op, device, kernel, dim3(unsigned(blocks), 1), kThreads, 0, stream, a);
}

}  // namespace

void kv_write(const KvLayer& layer, const void* k, const void* v, int64_t k_stride, int64_t v_stride,
              const int64_t* slots, int tokens, Type type, int device, cudaStream_t stream) {
  const char* op = "kv_write";
  check(layer, type, op);
  require(tokens > 0, op, "tokens", tokens, "must be positive");
  const DeviceGuard guard(device, op);
  Arguments a = arguments(layer, k, v, tokens);
  a.rows[0].token_stride = k_stride, a.rows[1].token_stride = v_stride;
  a.slots = slots;
  const int64_t warps = int64_t(tokens) * layer.kv_heads * scales_of(layer.head_dim);
  const auto kernel = type == Type::kBFloat16 ? kv_write_kernel<__nv_bfloat16> : kv_write_kernel<__half>;
  launch_rows(op, device, kernel, 32 * warps, stream, a, layer.value_bits);
}

void kv_read(const KvLayer& layer, void* k, void* v, int64_t live, Type type, int device, cudaStream_t stream) {
  const char* op = "kv_read";
  check(layer, type, op);
  require(live > 0 && live <= layer.capacity, op, "live", live, "must be from 1 to the capacity");
  require_aligned(k, 16, op, "dense k");
  require_aligned(v, 16, op, "dense v");
  const DeviceGuard guard(device, op);
  const Arguments a = arguments(layer, k, v, live);
  const int64_t threads = layer.kv_heads * live * (layer.head_dim / 8);
  const auto kernel = type == Type::kBFloat16 ? kv_read_kernel<__nv_bfloat16> : kv_read_kernel<__half>;
  launch_rows(op, device, kernel, threads, stream, a, layer.value_bits);
}

}  // namespace localq
