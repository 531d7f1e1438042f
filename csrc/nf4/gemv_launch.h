// Entry points of the two kernels of nf4_gemv.
#pragma once

#include "nf4/gemv.cuh"

namespace localq {

// One row of x; all matrices in tiled order, or none.
void nf4_gemv_row(const Nf4Gemv& p, const Workspace& workspace, const void* x, void* y, Type type, bool tiled,
                  int device, cudaStream_t stream);

// 2 to 8 rows of x; no norm.
void nf4_gemv_rows(const Nf4Gemv& p, const void* x, void* y, Type type, int rows, int device, cudaStream_t stream);

}  // namespace localq
