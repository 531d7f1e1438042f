// y = extras(x W^T) for 1 to 8 rows of x and up to three matrices that share x, W in binary codes: the sum of up to
// five sign vectors, each with a scale for every group of columns, and perhaps a zero point (localq/quant/bcq.py); x,
// bias and residual in f16 or bf16, sums in f32, rounded once.
//
// Signs are bits, and so is x, once it is fixed point: 16 planes of bits for every 128 columns, scaled by a power of
// two of their own (activations.cuh). Tensor cores count where both are set, m16n8k128 with .and.popc: the codes are
// operand A as they are stored (localq/quant/bcq_tiles.py), without an instruction between load and product
// (bit_products.cuh). A block has whole rows and no other to wait for; its warps share the columns of a tile, or its
// tiles, and go their own ways until all is added up.
//
// x is rounded to 2^-15 of the largest of its 128 columns, or better; what is added up of it is exact until it is
// multiplied by a scale. Deterministic, and what is not finite stays in its row. Bound: memory. Reads planes / 8 bytes
// per weight and 2 bytes per group and layer once.
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
