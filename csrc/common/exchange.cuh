// Words of global memory that a block writes and another one waits for, in a Workspace. GPU intrinsics: tests
// substitute a CPU version.
//
// A word that is not vacant is a complete sum, so there is no fence and no counter, only one trip through L2 (Lamport
// mailboxes, as in the all-reduce of TensorRT-LLM, cpp/tensorrt_llm/kernels/communicationKernels). The reader of a word
// makes it vacant again for the next launch, which cannot write before this one has ended. Whoever waits must know that
// the block it waits for runs at the same time.
#pragma once

#include <cstdint>

#include "common/workspace.h"

namespace localq {

// Stores a word for another block. Relaxed: it orders nothing else.
__device__ __forceinline__ void put(uint32_t* to, uint32_t word) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

// The word for a sum. A NaN with the bits of kVacant becomes another NaN.
__device__ __forceinline__ uint32_t word_of(float sum) {
  const uint32_t bits = uint32_t(__float_as_int(sum));
  return bits == kVacant ? 0x7fffffffu : bits;
}

// The current value of a word, or zero if not `wanted`. Branch-free, so that many loads are in flight together.
__device__ __forceinline__ uint32_t get_if(bool wanted, const uint32_t* from) {
  uint32_t word = 0;
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n @p ld.relaxed.gpu.global.u32 %0, [%1];\n}"
               : "+r"(word)
               : "l"(from), "r"(uint32_t(wanted))
               : "memory");
  return word;
}

// The current values of four words at a multiple of 16 bytes; each is vacant or complete by itself.
__device__ __forceinline__ uint4 get_four(const uint32_t* from) {
  uint4 words;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(from)
               : "memory");
  return words;
}

}  // namespace localq
