// y = extras(x W^T) for 1 to 8 rows of x and up to three matrices that share x, W a sum of codewords: one or two books
// of 256, codewords of at most 32 weights every 2, 4, 8 or 16 columns (localq/quant/vq2.py; AQLM's 1x8 and 2x8); x,
// bias and residual in f16 or bf16, sums in f32, rounded once. One row of x may be rotated first, behind its norm,
// by sign bits and Hadamard blocks (rotation.cuh).
//
// With T_h[k] = <x[stride h : stride h + length], codeword k>, a result is scale * sum over h of T_h[code of h]: one
// look-up per byte of codes, whatever the length. tables.cuh makes the tables of inner products, 64 KB at a time,
// code_lookup.cuh looks up, slice_reduce.cuh adds what blocks have of the same results.
//
// Blocks of threads form stripes of rows and slices of columns: the more rows a block has, the less its tables cost
// (256 entries for each position, once), so up to 32 slices share a stripe, and add up through global memory
// (slice_reduce.cuh). A slice has all books, or one: twice the columns of one book fill a table that half of them in
// two books leave half empty, twice. One block per multiprocessor, and never two: each asks for more than half of the
// shared memory (rows/gemv_kernel.cuh says why). Where there is room for two tables, a warp that has nothing left to
// look up begins its part of the next; with 4 and 8 rows of x both are of one step.
//
// Deterministic: every sum has one order, there are no float atomics. What is not finite in x makes its whole row of y
// NaN, and no other. Bound: memory. Reads 256 / stride bytes per 256 weights of each book once, the next item of each
// warp (32 KB per block) in flight through all steps; the first is asked for right behind x, which would wait for it.
#include "lookup/gemv_kernel.cuh"
#include "lookup/gemv_launch.h"

namespace localq::vq {

template <typename T, int kRows>
void start(Arguments p, const Plan& plan, const void* x, void* y, int device, cudaStream_t stream) {
  launch(kOp, device, vq_gemv_kernel<T, kRows>, plan.blocks, kThreads, plan.shared_bytes, stream, p,
         static_cast<const T*>(x), y);
}

#define LOCALQ_VQ_INSTANCE(T, ROWS) \
  template void start<T, ROWS>(Arguments, const Plan&, const void*, void*, int, cudaStream_t)
LOCALQ_VQ_INSTANCE(__half, 1);
LOCALQ_VQ_INSTANCE(__half, 2);
LOCALQ_VQ_INSTANCE(__half, 4);
LOCALQ_VQ_INSTANCE(__half, 8);
LOCALQ_VQ_INSTANCE(__nv_bfloat16, 1);
LOCALQ_VQ_INSTANCE(__nv_bfloat16, 2);
LOCALQ_VQ_INSTANCE(__nv_bfloat16, 4);
LOCALQ_VQ_INSTANCE(__nv_bfloat16, 8);

}  // namespace localq::vq
