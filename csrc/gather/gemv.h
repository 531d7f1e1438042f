// Products with weights gathered from codebooks too large for look-up tables: AQLM with one codebook of up to 65,536
// entries (aqlm_gemv.cu), VPTQ (vptq_gemv.cu), and their bandwidth limit (roofline.cu). Host API.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/gemv.h"
#include "common/types.h"
#include "gather/vptq.h"

namespace localq {

// AQLM with one codebook (localq/formats/codebooks/aqlm.py): a matrix [out, in] in groups of one row and 8 or 16
// columns.
struct GatherMatrix {
  const uint16_t* codes;  // [out, in / group], an even number per row, taken modulo `entries`
  const void* codebook;   // T [entries, group], entries a power of two
  const void* scales;     // T [out]
  int64_t out, in, entries, group;
};

// y [rows, sum of outs] = extras(x [rows, in] W^T) for `count` matrices with the same x, equal numbers of entries and
// equal groups. 1 to 8 rows; x and all codebooks are float16 or all bfloat16.
void gather_gemv(const GatherMatrix* matrices, int count, const GemvExtras& extras, const void* x, void* y, Type type,
                 int rows, int device, cudaStream_t stream);

// The same for VPTQ with one group, without outliers, vectors of 8 or 16; tables and norm have the type of x. The
// matrices have equal vector lengths, counts and bits; each has its own permutation and norm, or none has.
void vptq_gemv(const Vptq* matrices, int count, const GemvExtras& extras, const void* x, void* y, Type type, int rows,
               int device, cudaStream_t stream);

// Each of `threads` threads (a multiple of 256) reads `loads` times 16 bytes at random multiples of `step` bytes (16 or
// 32) of table [bytes], which has a power of two of steps; sums [threads] u32 depend on all bytes read.
void gather_roof(const void* table, int64_t bytes, int step, int loads, int64_t threads, uint32_t* sums, int device,
                 cudaStream_t stream);

}  // namespace localq
