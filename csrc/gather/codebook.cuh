// What products share that gather codewords: a codebook that lies in L2, and its first entries in shared memory.
//
// L2 moves whole sectors of 32 bytes: a codeword of 8 16-bit values uses half of one. Entries that a block keeps in its
// own shared memory cost no sector: of 65,536 entries of 16 bytes an H200 holds a fifth. Filling them costs 16 bytes of
// L2 traffic each and they save 32 for each code that names them, so a launcher keeps them only where a block reads
// enough codes (`worth_keeping`).
#pragma once

#include "common/launch.h"
#include "gather/intrinsics.cuh"
#include "rows/gemv_kernel.cuh"

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

// Of a block's shared memory, what codewords are kept in at most, together with all else. The rest is L1, which loads
// on their way need: with all of it kept an H200 has 28 KB for them, with this much 92.
constexpr uint32_t kSharedPercent = 71;

// Bytes behind `needed` of `most` that keep entries of `entry_bytes`, in `copies`, of `whole` bytes that there are.
inline uint32_t kept_of(uint32_t most, uint32_t needed, uint32_t copies, uint32_t whole, uint32_t entry_bytes) {
  const uint32_t shared = uint32_t(uint64_t(most) * kSharedPercent / 100);
  const uint32_t room = shared > needed ? (shared - needed) / copies / entry_bytes * entry_bytes : 0;
  return room < whole ? room : whole;
}

// Does it pay to keep entries of `entry_bytes` that a block reads `codes` of `entries` from? Half as much again must be
// saved as is filled.
inline bool worth_keeping(uint64_t codes, uint64_t entries, uint64_t entry_bytes) {
  const uint64_t sectors = (entry_bytes + 31) / 32 * 32;
  return 2 * codes * sectors >= 3 * entries * entry_bytes;
}

}  // namespace localq
