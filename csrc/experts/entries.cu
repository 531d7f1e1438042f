// Entries of a mixture (a token and one of its experts): sorted by expert before the products, summed by token behind
// them.
//
// experts_sort is one block: it counts the entries of each expert, adds the counts, and gives every entry a place.
// Counts and places are taken by atomic additions, so the order within an expert is arbitrary. Bound: latency, some
// count / 1024 additions to shared memory one after the other, twice.
//
// experts_sum: a block a token; a thread eight columns. Bound: memory.
#include "common/check.h"
#include "common/launch.h"
#include "common/rounding.cuh"
#include "common/shared_memory.cuh"
#include "experts/grouped.h"

namespace localq {
namespace {

constexpr int kSortThreads = 1024, kSumThreads = 256;

__device__ __forceinline__ int expert_of(const ExpertEntries& e, int64_t entry) {
  return int(min(max(e.chosen[entry], int64_t(0)), int64_t(e.experts - 1)));
}

// Sums of values[0 .. i], in place. Called by all threads, at least `count`; ends with a barrier.
__device__ __forceinline__ void add_up(int* values, int count) {
  for (int step = 1; step < count; step *= 2) {
    const int i = int(threadIdx.x), before = i >= step && i < count ? values[i - step] : 0;
    __syncthreads();
    if (i < count) values[i] += before;
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kSortThreads) experts_sort_kernel(const __grid_constant__ ExpertEntries e) {
  int* const counts = reinterpret_cast<int*>(shared_memory());
  int* const tiles = counts + kSortThreads;
  const int expert = int(threadIdx.x);
  counts[expert] = 0;
  dependency_wait();
  release_dependents();
  __syncthreads();
  for (int64_t i = threadIdx.x; i < e.count; i += kSortThreads) atomicAdd(&counts[expert_of(e, i)], 1);
  __syncthreads();
  const int own = counts[expert];
  tiles[expert] = (own + kTileEntries - 1) / kTileEntries;
  __syncthreads();
  add_up(counts, e.experts);
  add_up(tiles, e.experts);
  if (expert < e.experts) e.ends[expert] = counts[expert], e.tile_ends[expert] = tiles[expert];
  counts[expert] -= own;  // each thread its own: the expert's first place
  __syncthreads();
  for (int64_t i = threadIdx.x; i < e.count; i += kSortThreads) {
    const int place = atomicAdd(&counts[expert_of(e, i)], 1);
    e.rows[place] = int32_t(i / e.active), e.places[i] = place;
  }
}

template <typename T>
__global__ void __launch_bounds__(kSumThreads)
    experts_sum_kernel(const T* x, const int32_t* places, const float* weights, T* y, int active, uint32_t width) {
  dependency_wait();
  release_dependents();
  const uint64_t token = blockIdx.x;
  for (uint32_t i = threadIdx.x; i < width / 8; i += kSumThreads) {
    float sum[8] = {};
#pragma unroll 4
    for (int j = 0; j < active; ++j) {
      const uint64_t row = uint32_t(places[token * active + j]);
      const Eight<T> eight = reinterpret_cast<const Eight<T>*>(x + row * width)[i];
      const float weight = weights[token * active + j];
#pragma unroll
      for (int k = 0; k < 8; ++k) sum[k] += weight * to_float(eight.value[k]);
    }
    Eight<T> rounded_sum;
#pragma unroll
    for (int k = 0; k < 8; ++k) round_to(sum[k], rounded_sum.value[k]);
    reinterpret_cast<Eight<T>*>(y + token * width)[i] = rounded_sum;
  }
}

template <typename T>
void launch_sum(const void* x, const int32_t* places, const float* weights, void* y, int64_t tokens, int active,
                int64_t width, int device, cudaStream_t stream) {
  launch("experts_sum", device, experts_sum_kernel<T>, dim3(uint32_t(tokens)), dim3(kSumThreads), 0, stream,
         static_cast<const T*>(x), places, weights, static_cast<T*>(y), active, uint32_t(width));
}

}  // namespace

void experts_sort(const ExpertEntries& e, int device, cudaStream_t stream) {
  constexpr const char* op = "experts_sort";
  require(e.experts >= 1 && e.experts <= kMostExperts + 1, op, "experts", e.experts, "must be from 1 to 513");
  require(e.active >= 1, op, "active", e.active, "must be positive");
  require(e.count >= 1 && e.count <= 1 << 24, op, "entries", e.count, "must be from 1 to 2^24");
  const DeviceGuard guard(device, op);
  launch(op, device, experts_sort_kernel, dim3(1), dim3(kSortThreads), 8 * kSortThreads, stream, e);
}

void experts_sum(const void* x, const int32_t* places, const float* weights, void* y, Type type, int64_t tokens,
                 int active, int64_t width, int device, cudaStream_t stream) {
  constexpr const char* op = "experts_sum";
  require(type != Type::kFloat32, op, "dtype", static_cast<int>(type), "must be float16 or bfloat16");
  require(tokens >= 1 && tokens <= 1 << 24, op, "tokens", tokens, "must be from 1 to 2^24");
  require(active >= 1, op, "active", active, "must be positive");
  require(width >= 8 && width % 8 == 0 && width <= 1 << 24, op, "width", width, "must be a positive multiple of 8");
  require_aligned(x, 16, op, "x");
  require_aligned(y, 16, op, "y");
  const DeviceGuard guard(device, op);
  if (type == Type::kFloat16) return launch_sum<__half>(x, places, weights, y, tokens, active, width, device, stream);
  launch_sum<__nv_bfloat16>(x, places, weights, y, tokens, active, width, device, stream);
}

}  // namespace localq
