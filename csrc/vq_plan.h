// vq_gemv: how a launch is cut (vq_cut.h), and their kernels.
#pragma once

#include "vq_gemv.cuh"

namespace localq::vq {

constexpr const char* kOp = "vq_gemv";

struct Plan {
  uint32_t blocks;
  uint32_t shared_bytes;
};

// Launches the kernel for up to kRows rows of x.
template <typename T, int kRows>
void start(Arguments p, const Plan& plan, const void* x, void* y, int device, cudaStream_t stream);

}  // namespace localq::vq
