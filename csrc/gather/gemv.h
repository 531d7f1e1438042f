// Products with weights that are gathered from codebooks too large for look-up tables: AQLM with one codebook of up to
// 65,536 entries (aqlm_gemv.cu) and VPTQ (vptq_gemv.cu); and the roof of both (roofline.cu).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/gemv.h"
#include "common/types.h"
#include "gather/vptq.h"

namespace localq {

// AQLM with one codebook (localq/quant/aqlm.py), a matrix [out, in] in groups of one row and 8 or 16 columns.
struct GatherMatrix {
  const uint16_t* codes;  // [out, in / group], an even number of them in a row; they count modulo `entries`
  const void* codebook;   // T [entries, group], a power of two of entries
  const void* scales;     // T [out]
  int64_t out, in, entries, group;
};

// y [rows, sum of outs] = extras(x [rows, in] W^T) for `count` matrices that share x, with entries and groups of one
// size; rows 1 to 8; type of x and of all codebooks float16 or bfloat16.
void gather_gemv(const GatherMatrix* matrices, int count, const GemvExtras& extras, const void* x, void* y, Type type,
                 int rows, int device, cudaStream_t stream);

// The same in VPTQ with one group, without outliers, vectors of 8 or 16; tables and norm of the type of x. The matrices
// have vectors, counts and bits of one size; each has its own permutation and norm, or none of them has.
void vptq_gemv(const Vptq* matrices, int count, const GemvExtras& extras, const void* x, void* y, Type type, int rows,
               int device, cudaStream_t stream);

// Reads `loads` times 16 bytes at random multiples of `step` bytes (16 or 32) of table [bytes], in every thread of
// `threads` (a multiple of 256; a power of two of steps in the table); sums [threads] u32 depend on all that was read.
void gather_roof(const void* table, int64_t bytes, int step, int loads, int64_t threads, uint32_t* sums, int device,
                 cudaStream_t stream);

}  // namespace localq
