// Samples the next token from the logits of one step.
//   score[i] = logit (soft-capped), divided by the penalty if seen (multiplied if negative)     f32
//   greedy:  the largest score; of equal ones the lowest id
//   sampled: weight[i] = exp((score[i] - largest) / temperature); in the order (falling score, rising id) keep what
//            top-k, top-p and min-p keep; where XTC acts, drop the first of them that reach its share of the kept
//            weight, except the last of those; draw the first token whose cumulative weight exceeds u * remaining
//            weight
// logits f32 [vocab], vocab < 2^24; settings are in device memory, so that one captured graph serves all of them.
//
// Nothing is sorted. All three filters keep a prefix of one order, so only the weight of each prefix matters: that of
// top-k, then of top-p within it, then the smaller of it and the weight of all tokens kept by min-p. The draw falls
// into the smallest prefix by itself. XTC removes a prefix: its weight is added to the target of the draw. Each search
// is "the first token whose cumulative count (weight) reaches a target":
//   1 scan      every block: scores, largest, finite?                     the last block: greedy's choice
//   2 histogram every block: count and weight per bin of the score        the last block: the bin of the first search
//   3 refine    three times (top-k, top-p, draw; each exits at once if it is off): every block lists the tokens of that
//               bin; the last block finds the one in it, by digits of (score, id), and the bin of the next search
//   With XTC, before the draw: every block sums the weights that reach its threshold (share), the last block plans a
//               fourth search, for the last of these tokens (refine)
// A bin is a monotone function of the score: 1/1024 of the 32 nats below the largest; the last one takes all the rest.
//
// Weights are f64 rounded to integers of 2^-shift, shift = 62 - bits of vocab (2^-43 for 262,208 tokens), so every sum
// is exact and independent of the order: deterministic. Against f64 sums of the unrounded weights a prefix is off by at
// most vocab/2 units (2^-26 of the largest weight); only a draw or a top-p edge that close can select an adjacent
// token.
//
// Rows of a step that verifies a draft are chosen one behind the other, and advance the state like steps. Behind a
// choice that was not drafted the launches of the other rows end at once (`diverged`).
//
// Bound: latency. 5 bytes per token and launch, from L2 after the first.
#include "step/sample_search.cuh"

namespace localq {

namespace {

using namespace sampling;

constexpr const char* kOp = "sample";

// Merges the largest of the block's scores into `best`. Called by all threads.
__device__ void join_best(Work* work, unsigned long long best, bool finite) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) best = max(best, __shfl_xor_sync(~0u, best, step));
  __shared__ unsigned long long warp_best[kWarps];
  if (threadIdx.x % 32 == 0) warp_best[threadIdx.x / 32] = best;
  const bool all_finite = __syncthreads_and(finite);
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kWarps; ++i) best = max(best, warp_best[i]);
  atomicMax(&work->best, best);
  if (!all_finite) atomicOr(&work->not_finite, 1u);
}

// The last block of the scan: one thread records the results so far, and resets the workspace.
__device__ void settle(const Context& c, bool greedy) {
  Work* work = c.work;
  const unsigned long long best = __ldcg(&work->best);
  const bool finite = __ldcg(&work->not_finite) == 0;
  const int id = int(~unsigned(best));
  work->best = 0;
  work->not_finite = 0;
  work->top = score_of(unsigned(best >> 32));
  work->top_id = id;
  work->finished = greedy || !finite;
  if (work->finished) emit(c, finite ? id : kNone);
}

__global__ void __launch_bounds__(kThreads) sample_scan_kernel(Context c, bool greedy) {
  __shared__ bool last;
  release_dependents();
  dependency_wait();
  if (is_skipped(c)) return;
  const float penalty = penalty_of(c);
  const int vocab = int(c.s.vocab), threads = gridDim.x * kThreads;
  unsigned long long best = 0;
  bool finite = true;
#pragma unroll 4
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < vocab; i += threads) {
    const float x = capped(c, i);
    finite &= isfinite(x);
    const unsigned key = ordered(penalized(x, __ldcg(c.s.seen + i), penalty));
    best = max(best, static_cast<unsigned long long>(key) << 32 | ~unsigned(i));
  }
  join_best(c.work, best, finite);
  if (!greedy) {  // for the histogram, which starts after this kernel
    for (int i = blockIdx.x * kThreads + threadIdx.x; i < kBins; i += threads) {
      c.work->weight[i] = 0;
      c.work->count[i] = 0;
    }
  }
  if (arrives_last(c.work, &last) && threadIdx.x == 0) {
    c.work->min_p_weight = c.work->kept = 0;
    for (int stage = 0; stage < kStages; ++stage) c.work->bin[stage] = kNone;
    settle(c, greedy);
  }
}

__global__ void __launch_bounds__(kThreads, 2) sample_histogram_kernel(Context c) {
  __shared__ Scratch scratch;
  release_dependents();
  for (int i = threadIdx.x; i < kBins; i += kThreads) scratch.bins.weight[i] = scratch.bins.count[i] = 0;
  if (threadIdx.x == 0) scratch.found = 0;
  dependency_wait();
  __syncthreads();
  if (is_skipped(c) || __ldcg(&c.work->finished)) return;
  const Settings settings = settings_of(c);
  const float penalty = penalty_of(c);
  unsigned long long min_p_weight = 0;
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < c.s.vocab; i += gridDim.x * kThreads) {
    const float x = score(c, i, penalty);
    const double weight = weight_of(x, settings);
    const unsigned long long whole = units(weight, c.unit);
    const int bin = bin_of(x, settings);
    atomicAdd(&scratch.bins.count[bin], 1u);
    if (whole != 0) add_shared(&scratch.bins.weight[bin], whole);
    if (weight >= settings.min_p) min_p_weight += whole;
  }
  if (min_p_weight != 0) add_shared(&scratch.found, min_p_weight);
  __syncthreads();
  for (int i = threadIdx.x; i < kBins; i += kThreads) {
    if (scratch.bins.count[i] != 0) atomicAdd(&c.work->count[i], scratch.bins.count[i]);
    if (scratch.bins.weight[i] != 0) atomicAdd(&c.work->weight[i], scratch.bins.weight[i]);
  }
  if (threadIdx.x == 0 && scratch.found != 0) atomicAdd(&c.work->min_p_weight, scratch.found);
  if (!arrives_last(c.work, &scratch.last)) return;
  const unsigned long long total = load_histogram(c.work, scratch);
  plan_next(c, scratch, kTopK, total);
}

// XTC: the kept weight of tokens that reach the threshold.
__global__ void __launch_bounds__(kThreads) sample_share_kernel(Context c) {
  __shared__ Scratch scratch;
  release_dependents();
  dependency_wait();
  if (is_skipped(c)) return;
  const unsigned long long kept = __ldcg(&c.work->kept);
  if (kept == 0) return;  // uniform over blocks: not written in this launch
  if (threadIdx.x == 0) scratch.found = 0;
  __syncthreads();
  const Settings settings = settings_of(c);
  const float penalty = penalty_of(c);
  const double least = __ldcg(c.s.floats + 4) * (double(kept) / c.unit);
  unsigned long long above = 0;
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < c.s.vocab; i += gridDim.x * kThreads) {
    const double weight = weight_of(score(c, i, penalty), settings);
    if (weight >= least) above += units(weight, c.unit);
  }
  if (above != 0) add_shared(&scratch.found, above);
  __syncthreads();
  if (threadIdx.x == 0 && scratch.found != 0) atomicAdd(&c.work->above, scratch.found);
  if (!arrives_last(c.work, &scratch.last)) return;
  above = min(kept, __ldcg(&c.work->above));  // equal scores beyond the kept ones reach it, too
  __syncthreads();                            // all threads have read it
  if (threadIdx.x == 0) c.work->above = 0;
  load_histogram(c.work, scratch);
  if (above == 0) return plan_draw(c, scratch, kept, 0);
  plan(c, scratch, kXtc, above);
}

__global__ void __launch_bounds__(kThreads) sample_refine_kernel(Context c, Stage stage) {
  __shared__ Scratch scratch;
  release_dependents();
  dependency_wait();
  if (is_skipped(c)) return;
  const int bin = __ldcg(&c.work->bin[stage]);
  if (bin == kNone) return;  // uniform over blocks: not written in this launch
  const Settings settings = settings_of(c);
  const float penalty = penalty_of(c);
#pragma unroll 4
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < c.s.vocab; i += gridDim.x * kThreads) {
    const float x = score(c, i, penalty);
    if (bin_of(x, settings) == bin) c.list[atomicAdd(&c.work->listed, 1u)] = rank_of(x, i);
  }
  if (!arrives_last(c.work, &scratch.last)) return;
  const int n = int(__ldcg(&c.work->listed));
  const Found found = search_list(c, settings, scratch, n, stage, __ldcg(&c.work->target[stage]));
  if (threadIdx.x == 0) {
    c.work->listed = 0;
    if (stage == kDraw) emit(c, int(found.rank & ((1u << kIdBits) - 1)));
  }
  if (stage == kDraw) return;
  __syncthreads();
  load_histogram(c.work, scratch);
  const unsigned long long before = __ldcg(&c.work->before_weight[stage]);
  if (stage == kXtc) return plan_draw(c, scratch, __ldcg(&c.work->kept), before + found.before);
  plan_next(c, scratch, Stage(stage + 1), before + found.through);
}

// localq/kernels/sampling.py allocates this much before the list.
constexpr size_t kWorkBytes = kBins * 12 + 256;
static_assert(sizeof(Work) <= kWorkBytes && kWorkBytes % 8 == 0, "the list would start inside the rest");

Context context_of(const Sample& s) {
  int bits = 0;
  while ((int64_t(1) << bits) < s.vocab) ++bits;
  auto* work = static_cast<Work*>(s.workspace);
  return {s, work, reinterpret_cast<unsigned long long*>(static_cast<char*>(s.workspace) + kWorkBytes),
          s.softcap > 0.f ? 1.f / s.softcap : 0.f, double(uint64_t(1) << (62 - bits))};
}

}  // namespace

void sample(const Sample& s, bool greedy, int device, cudaStream_t stream) {
  require(s.vocab >= 1 && s.vocab < (1 << kIdBits), kOp, "vocab", s.vocab, "must be from 1 to 2^24 - 1");
  require(s.capacity >= 1, kOp, "capacity", s.capacity, "must be positive");
  require(s.softcap >= 0.f, kOp, "softcap", int64_t(s.softcap), "must not be negative");
  require(!s.follows || s.diverged != nullptr, kOp, "diverged", 0, "must be given for a row that follows another");
  require_aligned(s.logits, 4, kOp, "logits");
  require_aligned(s.workspace, 8, kOp, "workspace");
  const DeviceGuard guard(device, kOp);
  const Context c = context_of(s);
  const int64_t wanted = (s.vocab + kThreads - 1) / kThreads;
  const int most = 2 * device_facts(device, kOp).multiprocessors;
  const dim3 grid(unsigned(wanted < most ? wanted : most)), block(kThreads);
  launch(kOp, device, sample_scan_kernel, grid, block, 0, stream, c, greedy);
  if (greedy) return;
  launch(kOp, device, sample_histogram_kernel, grid, block, 0, stream, c);
  for (const Stage stage : {kTopK, kTopP, kXtc, kDraw}) {
    if (stage == kXtc && s.excludes == nullptr) continue;
    if (stage == kXtc) launch(kOp, device, sample_share_kernel, grid, block, 0, stream, c);
    launch(kOp, device, sample_refine_kernel, grid, block, 0, stream, c, stage);
  }
}

}  // namespace localq
