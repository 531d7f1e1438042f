// y = extras(x W^T) for 1 to 8 rows of x and up to three matrices with the same x, W in binary codes: the sum of up to
// five sign vectors, each with a scale per group of columns, and optionally a zero point (localq/formats/bcq); x, bias
// and residual in f16 or bf16; sums in f32, rounded once.
//
// Both operands are bits: x becomes fixed point, 16 bit planes per 128 columns with a common power of two
// (activations.cuh). Tensor cores count the positions where both are set, m16n8k128 with .and.popc. The codes are
// operand A as stored (localq/formats/bcq/tiles.py), without an instruction between load and product
// (bit_products.cuh). A block has whole rows and does not wait for other blocks; its warps split the columns of a tile,
// or the tiles, and do not synchronize until their sums are added.
//
// x is rounded to 2^-15 of the largest of its 128 columns, or better; its sums are exact up to the multiplication by a
// scale. Deterministic; non-finite values stay in their row. Bound: memory. Reads planes / 8 bytes per weight and 2
// bytes per row, group and layer once.
#include "bcq/gemv_kernel.cuh"
#include "bcq/gemv_plan.h"
#include "common/launch.h"

namespace localq::bcq {

template <typename T, int kRows>
void start(const Arguments& p, const Plan& plan, const void* x, void* y, int device, cudaStream_t stream) {
  const auto kernel = p.word_shift < 31    ? bcq_gemv_kernel<T, kRows, Groups::kWords>
                      : p.block_shift == 0 ? bcq_gemv_kernel<T, kRows, Groups::kBlock>
                                           : bcq_gemv_kernel<T, kRows, Groups::kBlocks>;
  launch(kOp, device, kernel, plan.blocks, kThreads, plan.shared_bytes, stream, p, static_cast<const T*>(x), y);
}

#define LOCALQ_BCQ_INSTANCE(T, ROWS) \
  template void start<T, ROWS>(const Arguments&, const Plan&, const void*, void*, int, cudaStream_t)
LOCALQ_BCQ_INSTANCE(__half, 1);
LOCALQ_BCQ_INSTANCE(__half, 2);
LOCALQ_BCQ_INSTANCE(__half, 4);
LOCALQ_BCQ_INSTANCE(__half, 8);
LOCALQ_BCQ_INSTANCE(__nv_bfloat16, 1);
LOCALQ_BCQ_INSTANCE(__nv_bfloat16, 2);
LOCALQ_BCQ_INSTANCE(__nv_bfloat16, 4);
LOCALQ_BCQ_INSTANCE(__nv_bfloat16, 8);

}  // namespace localq::bcq
