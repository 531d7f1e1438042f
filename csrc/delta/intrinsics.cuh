// GPU intrinsics of gated delta nets: a quick reciprocal, asynchronous copies to shared memory, loads of 8 x 8
// matrices, and their transposition between lanes. Tests substitute a CPU version.
#pragma once

#include <cstdint>

#include "common/shared_memory.cuh"

namespace localq::delta {

// 1 / x within two units of the last place; 0 from 2^126 on.
__device__ __forceinline__ float reciprocal(float x) {
  return __fdividef(1.f, x);
}

// Copies 16 bytes to shared memory. `wait_for_copies` waits for all copies of this thread, after which a barrier makes
// them visible to the block.
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Four 8 x 8 matrices of 16-bit values: lane 8 m + i gives the address of row i of matrix m, and gets the values
// (lane / 4, 2 (lane % 4)) and the next of matrix m as word m.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}
// The same of the transposed matrices.
__device__ __forceinline__ void load_transposed(uint32_t (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}
// An 8 x 8 matrix in the order of `load_matrices`, transposed.
__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
  uint32_t to;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(to) : "r"(pair));
  return to;
}

}  // namespace localq::delta
