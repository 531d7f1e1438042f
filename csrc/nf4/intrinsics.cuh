// What of the NF4 products only a GPU can do, beside common/row_loads.cuh and common/block_loads.cuh, so that the rest
// runs on a CPU as well (tests/support/nf4_machine_on_cpu.cuh).
#pragma once

#include <cstdint>

#include "common/block_loads.cuh"

// Shared memory of a launch as `name`. As a function it would change the code of the kernels.
#define LOCALQ_DYNAMIC_MEMORY(name) extern __shared__ __align__(16) uint8_t name[]

namespace localq {

// Four words of x, in shared or global memory. volatile keeps x of later blocks from being loaded before it is needed,
// for which there are no registers.
__device__ __forceinline__ void load_four(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, const uint4* from) {
  asm volatile("ld.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"(from));
}

// sum += scale * c for the two columns of a pair of products that count, in the lanes that own them. As one volatile
// piece, because ptxas would otherwise put it off to the end of the item and spill the products.
__device__ __forceinline__ void add_pair(float (&sum)[2], const float (&scale)[4], const float (&even)[4],
                                         const float (&odd)[4], bool owner) {
  asm volatile(
      "{.reg .pred p; setp.ne.s32 p, %8, 0;"
      "@p fma.rn.f32 %0, %2, %4, %0; @p fma.rn.f32 %1, %3, %5, %1;"
      "@p fma.rn.f32 %0, %9, %6, %0; @p fma.rn.f32 %1, %10, %7, %1;}"
      : "+f"(sum[0]), "+f"(sum[1])
      : "f"(scale[0]), "f"(scale[2]), "f"(even[0]), "f"(even[2]), "f"(odd[1]), "f"(odd[3]), "r"(int(owner)),
        "f"(scale[1]), "f"(scale[3]));
}

}  // namespace localq
