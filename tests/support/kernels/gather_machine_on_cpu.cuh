// In place of csrc/gather/intrinsics.cuh, behind vq_machine_on_cpu.cuh: what products that gather take from a GPU.
#pragma once

#include "common/row_loads.cuh"

inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return uint32_t((uint64_t(high) << 32 | low) >> (shift % 32));
}

namespace localq {

struct Codebook {
  const uint8_t* entries;
  uint32_t shared, kept;
};

inline uint4 gather(const Codebook& book, uint32_t offset) {
  if (offset >= book.kept) return *reinterpret_cast<const uint4*>(book.entries + offset);
  uint4 words;
  std::memcpy(&words, &on_cpu::now->block->memory.at(book.shared + offset + 15) - 15, 16);
  return words;
}
inline void ask_kept(uint32_t to, const uint8_t* from) {
  std::memcpy(&on_cpu::now->block->memory.at(to + 15) - 15, from, 16);
}
inline void wait_kept() {
}
inline uint32_t load_codes_4(const uint8_t* at, int left, int needed) {
  return left > needed ? *reinterpret_cast<const uint32_t*>(at) : 0;
}
inline uint32_t load_index_2(const uint16_t* at, int left, int needed) {
  return left > needed ? *at : 0;
}

}  // namespace localq
