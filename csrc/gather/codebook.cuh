// Shared by the products that gather codewords: a codebook in L2, with its first entries in shared memory.
//
// L2 transfers whole sectors of 32 bytes, so a codeword of eight 16-bit values uses half of one. Entries in a block's
// shared memory cost no sector: of 65,536 entries of 16 bytes an H200 holds a fifth. Each costs 16 bytes of L2 traffic
// to fill and saves 32 for each code that refers to it, so a launcher keeps entries only if a block reads enough codes
// (`worth_keeping`).
#pragma once

#include "common/launch.h"
#include "gather/intrinsics.cuh"
#include "rows/gemv_kernel.cuh"

namespace localq {

// Requests the first book.kept bytes of a codebook, a multiple of 16, into shared memory. Blocks begin at different
// offsets, so that they do not all read one slice of L2 at a time. Called by all threads, followed by `wait_kept` and a
// block barrier.
__device__ __forceinline__ void keep(const Codebook& book) {
  const uint32_t words = book.kept / 16, skipped = uint32_t(uint64_t(words) * blockIdx.x / gridDim.x);
  for (uint32_t i = threadIdx.x; i < words; i += blockDim.x) {
    const uint32_t turned = i + skipped, word = turned < words ? turned : turned - words;
    ask_kept(book.shared + 16 * word, book.entries + 16 * word);
  }
}

// Upper bound of a block's shared memory, in percent, including the kept entries. The rest is L1, which loads in flight
// need: an H200 has 92 KB for them with this bound, 28 KB without.
constexpr uint32_t kSharedPercent = 71;

// Bytes of entries of `entry_bytes` that fit in `most` after `needed`, in `copies`; at most `whole`, the codebook.
inline uint32_t kept_of(uint32_t most, uint32_t needed, uint32_t copies, uint32_t whole, uint32_t entry_bytes) {
  const uint32_t shared = uint32_t(uint64_t(most) * kSharedPercent / 100);
  const uint32_t room = shared > needed ? (shared - needed) / copies / entry_bytes * entry_bytes : 0;
  return room < whole ? room : whole;
}

// Whether keeping entries of `entry_bytes` pays off if a block reads `codes` codes of a book of `entries`: the saved
// traffic must be 1.5 times that of filling.
inline bool worth_keeping(uint64_t codes, uint64_t entries, uint64_t entry_bytes) {
  const uint64_t sectors = (entry_bytes + 31) / 32 * 32;
  return 2 * codes * sectors >= 3 * entries * entry_bytes;
}

}  // namespace localq
