// Adjustments of the logits before sampling: DRY and a mask. `sample` then reads scores.
//   dry_match: matches[t] = the longest suffix of the history, up to `longest` tokens, that also occurs earlier and is
//              followed there by t; breakers end it, and do not count as t                                       i32
//   adjust:    score[i] = the logit, soft-capped, divided by the penalty if seen (multiplied if negative), minus
//              penalties[matches[i]], clamped to +-1e38; -FLT_MAX where the mask forbids i                       f32
// One thread per earlier occurrence of the last token; it walks back along the end of the history. Integers and their
// maximum: deterministic. Non-finite values are passed on: a mask does not hide them.
//
// Bound: latency. dry_match reads 4 bytes per token of the history, and at most `longest` times as much if all of it
// repeats, from L2; adjust moves 8 bytes per token of the vocabulary, 13 with DRY.
#include "step/sample.cuh"

namespace localq {

namespace {

constexpr int kThreads = 256;
constexpr float kLargest = 1e38f;  // localq/engine/sampler.py, LARGEST_SCORE

__global__ void __launch_bounds__(kThreads) dry_match_kernel(DryMatch m) {
  release_dependents();
  dependency_wait();
  if (m.diverged != nullptr && __ldcg(m.diverged) != 0) return;
  const int64_t step = __ldcg(m.step);
  const int end = int(min(__ldcg(m.prompt) + step, m.size)) - 1;  // position of the last token
  const int last = step > 0 ? int(__ldcg(m.token)) : __ldcg(m.history + end);
  if (step > 0 && blockIdx.x == 0 && threadIdx.x == 0) m.history[end] = last;  // for later steps; not read in this one
  if (__ldcg(m.breakers + last)) return;
  const int start = int(max(int64_t(0), end + 1 - __ldcg(m.window)));
  for (int i = start + blockIdx.x * kThreads + threadIdx.x; i < end; i += gridDim.x * kThreads) {
    if (__ldcg(m.history + i) != last) continue;
    const int next = i + 1 == end ? last : __ldcg(m.history + i + 1);
    if (__ldcg(m.breakers + next)) continue;
    int length = 1;
    for (; length < m.longest && i - length >= start; ++length) {
      const int token = __ldcg(m.history + end - length);
      if (__ldcg(m.history + i - length) != token || __ldcg(m.breakers + token)) break;
    }
    atomicMax(m.matches + next, length);
  }
}

__global__ void __launch_bounds__(kThreads) adjust_kernel(Adjust a, float inverse_cap) {
  release_dependents();
  dependency_wait();
  if (a.diverged != nullptr && __ldcg(a.diverged) != 0) return;
  const float penalty = float(__ldcg(a.floats + 3));
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < a.vocab; i += gridDim.x * kThreads) {
    const int length = a.penalties == nullptr ? 0 : __ldcg(a.matches + i);
    float x = sampling::soft_capped(__ldcg(a.logits + i), a.softcap, inverse_cap);
    if (isfinite(x)) {
      x = sampling::penalized(x, __ldcg(a.seen + i), penalty);
      if (length != 0) x = __fsub_rn(x, __ldcg(a.penalties + length));  // not fused, like the reference
      x = fminf(fmaxf(x, -kLargest), kLargest);
      if (a.mask != nullptr && !(__ldcg(a.mask + i / 32) >> (i % 32) & 1)) x = -FLT_MAX;
    }
    a.logits[i] = x;
    if (length != 0) a.matches[i] = 0;
  }
}

// Blocks for up to `count` elements: at most two per multiprocessor.
dim3 grid_of(int64_t count, int device, const char* op) {
  const int64_t wanted = (count + kThreads - 1) / kThreads, most = 2 * device_facts(device, op).multiprocessors;
  return dim3(unsigned(wanted < most ? wanted : most));
}

}  // namespace

void dry_match(const DryMatch& m, int device, cudaStream_t stream) {
  constexpr const char* kOp = "dry_match";
  require(m.size >= 1 && m.size < INT32_MAX, kOp, "size", m.size, "must be from 1 to 2^31 - 2");
  require(m.longest >= 1, kOp, "longest", m.longest, "must be positive");
  require_aligned(m.history, 4, kOp, "history");
  require_aligned(m.matches, 4, kOp, "matches");
  const DeviceGuard guard(device, kOp);
  launch(kOp, device, dry_match_kernel, grid_of(m.size, device, kOp), dim3(kThreads), 0, stream, m);
}

void adjust(const Adjust& a, int device, cudaStream_t stream) {
  constexpr const char* kOp = "adjust";
  require(a.vocab >= 1 && a.vocab < INT32_MAX, kOp, "vocab", a.vocab, "must be from 1 to 2^31 - 2");
  require(a.softcap >= 0.f, kOp, "softcap", int64_t(a.softcap), "must not be negative");
  require_aligned(a.logits, 4, kOp, "logits");
  if (a.penalties != nullptr) require_aligned(a.matches, 4, kOp, "matches");
  const DeviceGuard guard(device, kOp);
  const float inverse_cap = a.softcap > 0.f ? 1.f / a.softcap : 0.f;
  launch(kOp, device, adjust_kernel, grid_of(a.vocab, device, kOp), dim3(kThreads), 0, stream, a, inverse_cap);
}

}  // namespace localq
