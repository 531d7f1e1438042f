// In place of csrc/row_machine.cuh, behind vq_machine_on_cpu.cuh: what products row by row take from a GPU.
#pragma once

#include "vq_machine.cuh"

inline uint32_t __float_as_uint(float value) {
  return on_cpu::bits<uint32_t>(value);
}

namespace localq {

inline uint4 load_weights(const uint8_t* at, int left, int needed) {
  return left > needed ? *reinterpret_cast<const uint4*>(at) : uint4{};
}
inline uint4 load_x(const uint8_t* at, int left, int needed) {
  return load_weights(at, left, needed);
}
// Conflicts between banks are counted, of the lanes that load.
inline uint4 load_shared(uint32_t at, int left, int needed) {
  const bool there = left > needed;
  const std::vector<uint32_t> all = on_cpu::exchanged(there ? at : ~0u);
  const uint32_t quarter = threadIdx.x % 32 / 8 * 8;  // lanes that are served together
  uint32_t instead = 0;                               // of a lane that loads nothing
  for (uint32_t lane = quarter; lane < quarter + 8; ++lane) instead = all[lane] != ~0u ? all[lane] : instead;
  on_cpu::count(on_cpu::lookups, there ? at : instead, 16);
  auto& memory = on_cpu::now->block->memory;
  return there ? *reinterpret_cast<const uint4*>(&memory.at(at + 15) - 15) : uint4{};
}
inline uint32_t address_in_shared(const void* pointer) {
  return uint32_t(static_cast<const uint8_t*>(pointer) - on_cpu::now->block->memory.data());
}
inline uint8_t* dynamic_memory() {
  return on_cpu::now->block->memory.data();
}
inline uint32_t select_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t from = selector >> (4 * i) & 15, at = from & 7;
    const uint32_t byte = (at < 4 ? low >> (8 * at) : high >> (8 * (at - 4))) & 255;
    out |= (from < 8 ? byte : byte >> 7 ? 255u : 0u) << (8 * i);
  }
  return out;
}

// m16n8k32 by the PTX manual's layout.
inline void mma(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  on_cpu::Warp& warp = on_cpu::warp();
  const uint32_t me = threadIdx.x % 32, words[6] = {a[0], a[1], a[2], a[3], b0, b1};
  std::copy(words, words + 6, warp.word[me]);
  std::memcpy(warp.sum[me], c, sizeof(c));
  on_cpu::meet_lanes([&warp] {
    int left[16][32], right[32][8];
    const auto value = [&warp](int lane, int word, int byte) {
      return int(int8_t(warp.word[lane][word] >> (8 * byte)));
    };
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4 * 4;
      for (int i = 0; i < 4; ++i) {
        left[g][t + i] = value(lane, 0, i), left[g + 8][t + i] = value(lane, 1, i);
        left[g][t + i + 16] = value(lane, 2, i), left[g + 8][t + i + 16] = value(lane, 3, i);
        right[t + i][g] = value(lane, 4, i), right[t + i + 16][g] = value(lane, 5, i);
      }
    }
    for (int i = 0; i < 128; ++i) {
      const int lane = i / 4, row = lane / 4 + i % 4 / 2 * 8, column = lane % 4 * 2 + i % 2;
      int sum;
      std::memcpy(&sum, &warp.sum[lane][i % 4], 4);
      for (int k = 0; k < 32; ++k) sum += left[row][k] * right[k][column];
      std::memcpy(&warp.sum[lane][i % 4], &sum, 4);
    }
  });
  std::memcpy(c, warp.sum[me], sizeof(c));
  on_cpu::meet_lanes([] {});
}

}  // namespace localq
