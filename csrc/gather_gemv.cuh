// What products share that gather codewords: a codebook that lies in L2, and its first entries in shared memory.
//
// L2 moves whole sectors of 32 bytes: a codeword of 8 16-bit values uses half of one. Entries that a block keeps in its
// own shared memory cost no sector: of 65,536 entries of 16 bytes an H200 holds a fifth. Filling them costs 16 bytes of
// L2 traffic each and they save 32 for each code that names them, so a launcher keeps them only where a block reads
// enough codes (`worth_keeping`).
#pragma once

#include "gather_machine.cuh"
#include "launch.h"
#include "row_gemv.cuh"

namespace localq {

// Asks for the first book.kept bytes of a codebook, a multiple of 16, to its place in shared memory. Blocks begin at
// different places, so that they do not all ask one slice of L2 at a time. All threads; then `wait_kept`, synchronise.
__device__ __forceinline__ void keep(const Codebook& book) {
  const uint32_t words = book.kept / 16, skipped = uint32_t(uint64_t(words) * blockIdx.x / gridDim.x);
  for (uint32_t i = threadIdx.x; i < words; i += blockDim.x) {
    const uint32_t turned = i + skipped, word = turned < words ? turned : turned - words;
    ask_kept(book.shared + 16 * word, book.entries + 16 * word);
  }
}

// How much of the shared memory that is left keeps codewords. The rest is L1, which loads on their way need: with all
// of it kept an H200 has 28 KB for them; below 100 the launch asks for the division that leaves L1 the rest.
constexpr uint32_t kKeptPercent = 100;

// Bytes of `room` that keep entries of `entry_bytes`, of `whole` bytes that there are.
inline uint32_t kept_of(uint32_t room, uint32_t whole, uint32_t entry_bytes) {
  const uint32_t most = room * kKeptPercent / 100 / entry_bytes * entry_bytes;
  return most < whole ? most : whole;
}

// Does it pay to keep entries of `entry_bytes` that a block reads `codes` of `entries` from? Half as much again must be
// saved as is filled.
inline bool worth_keeping(uint64_t codes, uint64_t entries, uint64_t entry_bytes) {
  const uint64_t sectors = (entry_bytes + 31) / 32 * 32;
  return 2 * codes * sectors >= 3 * entries * entry_bytes;
}

}  // namespace localq
