// Epilogue of gemv.cuh: from the sums of tiles to results.
#pragma once

#include "experts/gemv.cuh"

namespace localq {

// gpt-oss: the gate is clamped from above, the up projection from both sides.
__device__ __forceinline__ float clamped_gate(const BlockGemv& p, float gate, float up) {
  gate = fminf(gate, p.limit), up = fminf(fmaxf(up, -p.limit), p.limit);
  return gate / (1.f + __expf(-p.alpha * gate)) * (up + 1.f);
}

template <typename T>
__device__ __forceinline__ void write_gate_up(const BlockGemv& p, const BlockShared& s, const UnitSpan& span,
                                              const ItemRun& run, float scale, T* y) {
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < span.count * kHalfTile; i += kBlockThreads) {
    const uint32_t tile = i / kHalfTile, g = i % kHalfTile, unit = span.begin + tile, slot = unit / p.slot_units;
    const uint32_t o = unit % p.slot_units * kHalfTile + g;
    if (o >= p.results) continue;
    const float gate = row_result(p, s, run, tile, g, scale), up = row_result(p, s, run, tile, g + kHalfTile, scale);
    const float value = p.clamped ? clamped_gate(p, gate, up) : activate(gate, p.extras.activation) * up;
    round_to(value, y[uint64_t(slot) * p.results + o]);
  }
}

// One thread per result and slot. The slots of a result are adjacent in a warp and are added in slot order.
template <typename T>
__device__ __forceinline__ void write_down(const BlockGemv& p, const BlockShared& s, const UnitSpan& span,
                                           const ItemRun& run, float scale, T* y) {
  uint32_t lanes = 1;  // per result
  while (lanes < p.slots) lanes *= 2;
  const uint32_t count = span.count * kHalfTile * lanes;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < (count + 31) / 32 * 32; i += kBlockThreads) {  // in whole warps
    const uint32_t slot = i % lanes, unit = min(i / lanes / kHalfTile, span.count - 1), g = i / lanes % kHalfTile;
    const uint32_t o = (span.begin + unit) * kHalfTile + g;
    const bool writes = slot == 0 && o < p.results && i < count;
    float value = 0.f, added = 0.f;
    if (writes && p.extras.residual != nullptr) added = to_float(static_cast<const T*>(p.extras.residual)[o]);
    if (slot < p.slots) {
      const float weight = p.weights[slot];
      value = weight * row_result(p, s, run, unit * p.parts + slot / 2, slot % 2 * kHalfTile + g, scale);
    }
    const int first = int(threadIdx.x % 32 / lanes * lanes);
    float total = 0.f;
#pragma unroll 1
    for (uint32_t j = 0; j < p.slots; ++j) total += __shfl_sync(~0u, value, first + int(j));
    if (writes) round_to(total + added, y[o]);
  }
}

// `scale`: row of x -> factor of its sums.
template <typename T, typename Scale>
__device__ __forceinline__ void write_dense(const BlockGemv& p, const BlockShared& s, const UnitSpan& span,
                                            const ItemRun& run, uint32_t rows, Scale scale, void* y) {
  const bool pair = p.kind == BlockKind::kPair;
  const uint32_t width = pair ? kHalfTile : kTileRows, count = span.count * width;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < count * rows; i += kBlockThreads) {
    const uint32_t row = i / count, tile = i % count / width, r = i % count % width;
    const uint32_t o = (span.begin + tile) * width + r;
    if (o >= p.results) continue;
    const uint64_t at = uint64_t(row) * p.results + o;
    float value = row_result(p, s, run, tile, r, scale(row), row);
    if (pair)
      value = activate(value, p.extras.activation) * row_result(p, s, run, tile, r + kHalfTile, scale(row), row);
    write_value<T>(p.extras, at, value, y);
  }
}

template <typename T>
__device__ __forceinline__ void write_results(const BlockGemv& p, const BlockShared& s, const UnitSpan& span,
                                              const ItemRun& run, float scale, void* y) {
  if (p.kind == BlockKind::kGateUp) return write_gate_up(p, s, span, run, scale, static_cast<T*>(y));
  if (p.kind == BlockKind::kDown) return write_down(p, s, span, run, scale, static_cast<T*>(y));
  write_dense<T>(p, s, span, run, 1, [=](uint32_t) { return scale; }, y);
}

}  // namespace localq
