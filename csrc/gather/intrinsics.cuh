// What of the products that gather codewords only a GPU can do, in one place, so that the rest runs on a CPU as well
// (tests/support/kernels/gather_machine_on_cpu.cuh): loads from L2 or shared memory, and copies from one to the other.
#pragma once

#include <cstdint>

#include "common/row_loads.cuh"

namespace localq {

// A codebook: its entries below `kept` bytes are also in shared memory.
struct Codebook {
  const uint8_t* entries;
  uint32_t shared;  // address in shared memory of entry 0
  uint32_t kept;
};

// 16 bytes of `book`, `offset` bytes from its begin. Not kept in L1, where hits are rare; on its way there it still
// needs room. volatile keeps loads and products in the order in which they are written, which is what fits the
// registers.
__device__ __forceinline__ uint4 gather(const Codebook& book, uint32_t offset) {
  uint4 v;
  asm volatile(
      "{.reg .pred p; setp.lt.u32 p, %6, %7; @p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
      "@!p ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%5];}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "r"(book.shared + offset), "l"(book.entries + offset), "r"(offset), "r"(book.kept));
  return v;
}

// Asks for 16 bytes into shared memory; `wait_kept` waits for all of the thread's.
__device__ __forceinline__ void ask_kept(uint32_t to, const uint8_t* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
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

// The same of 2 bytes.
__device__ __forceinline__ uint32_t load_index_2(const uint16_t* at, int left, int needed) {
  uint16_t v;
  asm volatile("{.reg .pred p; setp.gt.s32 p, %2, %3; mov.u16 %0, 0; @p ld.global.nc.L1::no_allocate.u16 %0, [%1];}"
               : "=&h"(v)
               : "l"(at), "r"(left), "r"(needed));
  return v;
}

}  // namespace localq
