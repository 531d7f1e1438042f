// Top-k routing of a token: the experts with the largest logits, and their weights.
//   logits   f32 [experts] = norm(x) W^T + bias, sums in f32 and not rounded;   W T [experts, in], bias T [experts]
//   chosen   i32 [active]: the largest logits in descending order; of equal ones the lowest index first
//   weights  f32 [active]: exp(logit - largest) over the sum of these, of the chosen experts or of all
// `route` takes logits, in one warp. `router` computes them first, one block per expert, and the block that increments
// a counter last makes the choice: one launch. The result does not depend on which block that is; the counter is left
// at zero. Of a mixture with a shared expert one more block writes its entry behind the chosen ones:
//   chosen[active] = experts;  weights[active] = sigmoid(norm(x) . gate), both logit and sigmoid rounded to T
// Needs in % 8 == 0; up to 512 experts and 16 chosen, with the shared one. Bound: latency. Reads experts * in * 2 bytes
// once; the first words of W are requested before x is available.
#include "common/block_loads.cuh"
#include "common/gemv.cuh"
#include "common/launch.h"
#include "experts/experts.h"

namespace localq {
namespace {

constexpr int kThreads = 256;
constexpr int kAhead = 2;  // words of W that a thread requests before x is available
constexpr int kOfLane = kMostExperts / 32;

// A key that rises with the float; -0 is 0. NaN is above all, so that a NaN is chosen and becomes visible.
__device__ __forceinline__ uint32_t key_of(float logit) {
  if (logit != logit) return ~0u;
  const uint32_t bits = __float_as_uint(logit + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The choice, by one warp. Lane j has experts j, j + 32, ..; round j gives lane j of the first `active` its expert.
__device__ __forceinline__ void choose(const float* logits, uint32_t experts, int active, Weighing how, float* weights,
                                       int32_t* chosen) {
  const uint32_t lane = threadIdx.x % 32;
  float logit[kOfLane];
  uint32_t key[kOfLane];
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    const uint32_t expert = lane + 32 * i;
    const bool there = expert < experts;
    logit[i] = there ? __ldcg(logits + expert) : 0.f;
    key[i] = there ? key_of(logit[i]) : 0u;  // no float has the key 0
  }
  float mine = 0.f, largest = 0.f;
  int32_t expert_of_lane = 0;
#pragma unroll 1
  for (int j = 0; j < active; ++j) {
    uint32_t best = 0;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) best = max(best, key[i]);
    best = __reduce_max_sync(~0u, best);
    uint32_t lowest = 0;  // ~expert, so that the largest is the lowest expert
    float of_best = 0.f;
#pragma unroll
    for (int i = kOfLane - 1; i >= 0; --i) {
      if (key[i] == best) lowest = ~(lane + 32 * i), of_best = logit[i];
    }
    const uint32_t expert = ~__reduce_max_sync(~0u, lowest);
    of_best = __shfl_sync(~0u, of_best, int(expert % 32));
    if (j == 0) largest = of_best;
    if (lane == uint32_t(j)) mine = of_best, expert_of_lane = int32_t(expert);
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      if (lane + 32 * i == expert) key[i] = 0;
    }
  }
  const float weight = __expf(mine - largest);
  float sum = 0.f;
  if (how == Weighing::kAll) {
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) sum += lane + 32 * i < experts ? __expf(logit[i] - largest) : 0.f;
  } else if (lane < uint32_t(active)) {
    sum = weight;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane < uint32_t(active)) chosen[lane] = expert_of_lane, weights[lane] = weight / sum;
}

__global__ void __launch_bounds__(32)
    route_kernel(const float* logits, uint32_t experts, int active, Weighing how, float* weights, int32_t* chosen) {
  release_dependents();
  dependency_wait();
  choose(logits, experts, active, how, weights, chosen);
}

template <typename T>
__device__ __forceinline__ float dot(const Eight<T>& a, const Eight<T>& b, float sum) {
#pragma unroll
  for (int k = 0; k < 8; ++k) sum = fmaf(to_float(a.value[k]), to_float(b.value[k]), sum);
  return sum;
}

// The entry of the shared expert, in the order of rounding of a Linear and a sigmoid in T.
template <typename T>
__device__ __forceinline__ void write_shared(const Router& r, float logit) {
  T rounded;
  round_to(logit, rounded);
  round_to(1.f / (1.f + __expf(-to_float(rounded))), rounded);
  r.chosen[r.active] = int32_t(r.experts), r.weights[r.active] = to_float(rounded);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) router_kernel(const __grid_constant__ Router r) {
  uint8_t* const memory = shared_memory();
  float* const scratch = reinterpret_cast<float*>(memory);  // one float per warp, and one for all
  T* const staged = reinterpret_cast<T*>(memory + 64);
  const uint32_t words = uint32_t(r.in) / 8, expert = blockIdx.x;
  const bool shared = expert == uint32_t(r.experts);  // the block behind those of the experts
  const auto* row = static_cast<const Eight<T>*>(shared ? r.shared_gate : r.weight) + (shared ? 0 : expert * words);
  Eight<T> ahead[kAhead] = {};
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (threadIdx.x + i * kThreads < words) ahead[i] = row[threadIdx.x + i * kThreads];
  }
  if (r.norm != NormKind::kNone) {  // every thread needs some of it
    const uint32_t size = r.norm == NormKind::kPlain ? sizeof(T) : sizeof(float);
    for (uint32_t at = threadIdx.x * 128; at < uint32_t(r.in) * size; at += kThreads * 128) {
      prefetch(static_cast<const uint8_t*>(r.norm_weight) + at);
    }
  }
  dependency_wait();
  release_dependents();
  GemvExtras extras = {};
  extras.norm = r.norm, extras.norm_weight = r.norm_weight, extras.eps = r.eps;
  stage_x(staged, static_cast<const T*>(r.x), int(r.in), extras, scratch);
  const auto* mine = reinterpret_cast<const Eight<T>*>(staged);  // each thread its own words
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    const uint32_t word = threadIdx.x + i * kThreads;
    if (word < words) sum = dot(ahead[i], mine[word], sum);
  }
  for (uint32_t word = threadIdx.x + kAhead * kThreads; word < words; word += kThreads) {
    sum = dot(row[word], mine[word], sum);
  }
  sum = block_sum(sum, scratch);
  if (shared) {
    if (threadIdx.x == 0) write_shared<T>(r, sum);
    return;
  }
  auto* logits = reinterpret_cast<float*>(r.workspace + 1);
  if (threadIdx.x == 0) {
    if (r.bias != nullptr) sum += to_float(static_cast<const T*>(r.bias)[expert]);
    __stcg(logits + expert, sum);
    __threadfence();
    const int before = atomicAdd(r.workspace, 1);
    scratch[kThreads / 32] = before + 1 == int(r.experts) ? 1.f : 0.f;
  }
  __syncthreads();
  if (scratch[kThreads / 32] == 0.f || threadIdx.x >= 32) return;
  __threadfence();
  if (threadIdx.x == 0) __stcg(r.workspace, 0);
  choose(logits, uint32_t(r.experts), r.active, r.how, r.weights, r.chosen);
}

void check_choice(const char* op, int64_t experts, int active, Weighing how, const void* weights, const void* chosen) {
  require(experts >= 1 && experts <= kMostExperts, op, "experts", experts, "must be from 1 to 512");
  require(active >= 1 && active <= kMostChosen && active <= experts, op, "active", active,
          "must be from 1 to 16 and at most the number of experts");
  require(how == Weighing::kChosen || how == Weighing::kAll, op, "how", static_cast<int>(how), "is unknown");
  require_aligned(weights, 4, op, "weights");
  require_aligned(chosen, 4, op, "chosen");
}

}  // namespace

void route(const float* logits, int64_t experts, int active, Weighing how, float* weights, int32_t* chosen, int device,
           cudaStream_t stream) {
  constexpr const char* op = "route";
  check_choice(op, experts, active, how, weights, chosen);
  require_aligned(logits, 4, op, "logits");
  const DeviceGuard guard(device, op);
  launch(op, device, route_kernel, dim3(1), dim3(32), 0, stream, logits, uint32_t(experts), active, how, weights,
         chosen);
}

void router(const Router& r, Type type, int device, cudaStream_t stream) {
  constexpr const char* op = "router";
  check_choice(op, r.experts, r.active, r.how, r.weights, r.chosen);
  require(type != Type::kFloat32, op, "dtype", static_cast<int>(type), "must be float16 or bfloat16");
  require(r.in >= 8 && r.in % 8 == 0, op, "in", r.in, "must be a positive multiple of 8");
  const int64_t bytes = 64 + 2 * r.in;
  require(bytes <= device_facts(device, op).shared_bytes_per_block, op, "in", r.in, "does not fit in shared memory");
  require_aligned(r.x, 16, op, "x");
  require_aligned(r.weight, 16, op, "weight");
  require_aligned(r.workspace, 4, op, "workspace");
  if (r.shared_gate != nullptr) {
    require(r.active < kMostChosen, op, "active", r.active, "must be at most 15 with a shared expert");
    require_aligned(r.shared_gate, 16, op, "shared_gate");
  }
  if (r.norm != NormKind::kNone) require_aligned(r.norm_weight, 2, op, "norm_weight");
  const DeviceGuard guard(device, op);
  auto* kernel = type == Type::kFloat16 ? router_kernel<__half> : router_kernel<__nv_bfloat16>;
  const unsigned blocks = unsigned(r.experts) + (r.shared_gate != nullptr ? 1 : 0);
  launch(op, device, kernel, dim3(blocks), dim3(kThreads), size_t(bytes), stream, r);
}

}  // namespace localq
