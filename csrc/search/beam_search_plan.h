// What a row's search on the GPU keeps in shared memory, and where: for the kernel (beam_search_kernel.cuh) and its
// launcher.
#pragma once

#include <algorithm>
#include <cstdint>

#include "search/beam_search.h"

namespace localq {

constexpr int kMostSearchEvents = 1024;  // of a block: they travel with the launch
constexpr uint8_t kLastEvent = 0x80;     // of its position; the other bits are the book
constexpr int kSearchPathsPerWarp = 16;  // so that a block has two threads for every path

// A block of columns as the kernel takes it: all pointers on the device, events and the plan by value.
struct Search {
  SearchBlock block;                 // `event` is not read
  uint8_t event[kMostSearchEvents];  // book | kLastEvent
  int warps, positions;
  int reach;    // floats of a path's tail: the longest codeword or what comes in, in whole vectors
  int segment;  // candidates that a warp may keep, even and no fewer than `beam`
  // Offsets in bytes. Of errors f32 [positions, beam, step]; paths, twice; choices u16 [events, beam]; lowest u32
  // [4, beam]; floors f32 [32 warps + 1]; counts i32 [warps].
  int paths, paths_bytes, choices, lowest, floors, counts, bytes;
  // Within the paths: tails f32 [reach / vector, beam, vector] first, then these. Candidates of all warps, u64
  // [warps, segment], lie where the next paths will: they are ranked before those are written.
  int aims, costs, origins;
};

// Floats of a vector, which a load of 16 bytes takes where the step allows.
constexpr int search_vector(int step) {
  return step < 4 ? step : 4;
}

inline int round_up(int value, int unit) {
  return (value + unit - 1) / unit * unit;
}

// Everything but events and pointers.
inline Search search_plan(const SearchBlock& block) {
  Search plan = {};
  plan.block = block;
  const int beam = block.beam, step = block.step;
  plan.positions = block.columns / step;
  plan.warps = 1;
  while (plan.warps * kSearchPathsPerWarp < beam) plan.warps *= 2;
  plan.reach = block.tail;
  for (int i = 0; i < block.books; ++i) plan.reach = std::max(plan.reach, block.length[i]);
  plan.reach = round_up(plan.reach, step);
  plan.segment = std::max(64, round_up(beam, 2));
  plan.aims = round_up(4 * plan.reach * beam, 16);         // f32 [beam, step]
  plan.costs = plan.aims + round_up(4 * step * beam, 16);  // f32 [beam, 2]
  plan.origins = plan.costs + round_up(8 * beam, 16);      // u8 [positions, beam]
  const int own = round_up(plan.origins + plan.positions * beam, 16);
  plan.paths = round_up(4 * block.columns * beam, 16);
  plan.paths_bytes = std::max(own, 8 * plan.warps * plan.segment);
  plan.choices = plan.paths + 2 * plan.paths_bytes;
  plan.lowest = plan.choices + round_up(2 * block.events * beam, 16);
  plan.floors = plan.lowest + 4 * 4 * beam;
  plan.counts = plan.floors + 4 * (32 * plan.warps + 1);
  plan.bytes = plan.counts + 4 * plan.warps;
  return plan;
}

}  // namespace localq
