// y = extras(x W^T) for 1 to 8 rows of x and up to three matrices with the same x, W a sum of codewords: one or two
// books of 256, codewords of at most 32 weights every 2, 4, 8 or 16 columns (localq/formats/codebooks: vq2, and AQLM's
// 1x8 and 2x8); x, bias and residual in f16 or bf16; sums in f32, rounded once. One row of x can be rotated first,
// after its norm, by sign bits and Hadamard blocks (rotation.cuh).
//
// With T_h[k] = <x[stride h : stride h + length], codeword k>, a result is scale * sum over h of T_h[code of h]: one
// look-up per byte of codes, whatever the length. tables.cuh builds the tables of inner products, 64 KB at a time,
// code_lookup.cuh looks up, slice_reduce.cuh adds the sums of several blocks.
//
// Blocks form stripes of rows and slices of columns. The more rows a block has, the less its tables cost (256 entries
// per position, once), so up to 32 slices share a stripe and are added through global memory (slice_reduce.cuh). A
// slice has all books, or one: twice as many columns of one book fill a table that half as many columns in two books
// leave half empty, twice. Each block requests more than half of the shared memory, so a multiprocessor never holds two
// (rows/gemv_kernel.cuh has the reason). If there is room for two tables, a warp without look-ups left starts its part
// of the next table; with 4 and 8 rows of x both tables belong to one step.
//
// Deterministic: every sum has a fixed order and there are no float atomics. A non-finite value in x makes its whole
// row of y NaN, and no other row. Bound: memory. Reads 256 / stride bytes per 256 weights of each book once, with the
// next item of each warp (32 KB per block) in flight through all steps; the first is requested after x, which would
// otherwise queue behind it.
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
