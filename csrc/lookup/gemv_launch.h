// vq_gemv: how a launch is cut (gemv_plan.h), and its kernels; bcq_gemv takes the plan from here.
#pragma once

#include "lookup/gemv.cuh"

namespace localq::vq {

constexpr const char* kOp = "vq_gemv";

inline uint32_t ceil_div(uint32_t a, uint32_t b) {
  return (a + b - 1) / b;
}

struct Plan {
  uint32_t blocks;
  uint32_t shared_bytes;
};

// Launches the kernel for up to kRows rows of x.
template <typename T, int kRows>
void start(Arguments p, const Plan& plan, const void* x, void* y, int device, cudaStream_t stream);

}  // namespace localq::vq
