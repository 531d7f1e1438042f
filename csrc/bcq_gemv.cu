// y = extras(x W^T) for 1 to 8 rows of x and up to three matrices that share x, W in binary codes: the sum of up to
// five sign vectors, each with a scale for every group of columns, and perhaps a zero point (localq/quant/bcq.py); x,
// bias and residual in f16 or bf16, sums in f32, rounded once.
//
// vq_gemv with one book whose 256 codewords are the sign vectors of 8 columns: vq_tables.cuh makes the tables, once for
// all planes, vq_join.cuh joins slices. bcq_lookup.cuh has what differs: what a plane's codes add up to in a group is
// multiplied by the group's scale, which costs four multiplications for 64 look-ups, because the order of the codes
// (localq/quant/bcq_tiles.py) leaves what a lane adds up in one group of 128 columns or more. Smaller groups, and
// columns behind the last whole 1,024, pay them for every 16 look-ups.
//
// Planes of one tile are work for several warps where each has sums of its own; a launch is cut into any number of
// slices of 1,024 columns. Deterministic, as vq_gemv, and what is not finite stays in its row. Bound: memory. Reads
// planes / 8 bytes per weight and 2 bytes per group and layer once.
#include "bcq_kernel.cuh"
#include "vq_plan.h"

namespace localq::bcq {

template <typename T, int kRows>
void start(Arguments p, const Plan& plan, const void* x, void* y, int device, cudaStream_t stream) {
  launch(kOp, device, bcq_gemv_kernel<T, kRows>, plan.blocks, kThreads, plan.shared_bytes, stream, p,
         static_cast<const T*>(x), y);
}

#define LOCALQ_BCQ_INSTANCE(T, ROWS) \
  template void start<T, ROWS>(Arguments, const Plan&, const void*, void*, int, cudaStream_t)
LOCALQ_BCQ_INSTANCE(__half, 1);
LOCALQ_BCQ_INSTANCE(__half, 2);
LOCALQ_BCQ_INSTANCE(__half, 4);
LOCALQ_BCQ_INSTANCE(__half, 8);
LOCALQ_BCQ_INSTANCE(__nv_bfloat16, 1);
LOCALQ_BCQ_INSTANCE(__nv_bfloat16, 2);
LOCALQ_BCQ_INSTANCE(__nv_bfloat16, 4);
LOCALQ_BCQ_INSTANCE(__nv_bfloat16, 8);

}  // namespace localq::bcq
