// What products share that gather codewords: a codebook that lies in L2, and its first entries in shared memory.
//
// L2 moves whole sectors of 32 bytes: a codeword of 8 16-bit values uses half of one. Entries that a block keeps in its
// own shared memory cost no sector: of 65,536 entries of 16 bytes an H200 holds a fifth. Filling them costs 16 bytes of
// L2 traffic each and they save 32 for each code that names them, so a launcher keeps them only where a block reads
// enough codes (`worth_keeping`).
#pragma once

#include "launch.h"
#include "row_gemv.cuh"

namespace localq {

// A codebook: its entries below `kept` bytes are also in shared memory.
struct Codebook {
  const uint8_t* entries;
  uint32_t shared;  // address in shared memory of entry 0
  uint32_t kept;
};

// 16 bytes of `book`, `offset` bytes from its begin. Past L1: hits are rare, and shared memory leaves it no room.
// volatile keeps loads and products in the order in which they are written, which is what fits the registers.
__device__ __forceinline__ uint4 gather(const Codebook& book, uint32_t offset) {
  uint4 v;
  asm volatile(
      "{.reg .pred p; setp.lt.u32 p, %6, %7; @p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
      "@!p ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%5];}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "r"(book.shared + offset), "l"(book.entries + offset), "r"(offset), "r"(book.kept));
  return v;
}

// Asks for the first book.kept bytes of a codebook, a multiple of 16, to its place in shared memory. Blocks begin at
// different places, so that they do not all ask one slice of L2 at a time. All threads; then `wait_kept`, synchronise.
__device__ __forceinline__ void keep(const Codebook& book) {
  const uint32_t words = book.kept / 16, skipped = uint32_t(uint64_t(words) * blockIdx.x / gridDim.x);
  for (uint32_t i = threadIdx.x; i < words; i += blockDim.x) {
    const uint32_t turned = i + skipped, word = turned < words ? turned : turned - words;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(book.shared + 16 * word),
                 "l"(book.entries + 16 * word)
                 : "memory");
  }
}
__device__ __forceinline__ void wait_kept() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// 4 bytes of codes where more than `needed` are left, else zero.
__device__ __forceinline__ uint32_t load_codes_4(const uint8_t* at, int left, int needed) {
  uint32_t v;
  asm volatile(
      "{.reg .pred p; setp.gt.s32 p, %2, %3; mov.u32 %0, 0; @p ld.global.nc.L1::no_allocate.L2::128B.u32 %0, [%1];}"
      : "=&r"(v)
      : "l"(at), "r"(left), "r"(needed));
  return v;
}

// Does it pay to keep entries of `entry_bytes` that a block reads `codes` of `entries` from? Half as much again must be
// saved as is filled.
inline bool worth_keeping(uint64_t codes, uint64_t entries, uint64_t entry_bytes) {
  const uint64_t sectors = (entry_bytes + 31) / 32 * 32;
  return 2 * codes * sectors >= 3 * entries * entry_bytes;
}

}  // namespace localq
