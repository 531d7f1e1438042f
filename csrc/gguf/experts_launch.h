// The launcher of gguf_experts_kernel for each block type: experts_32.cu and experts_256.cu have the instances.
#pragma once

#include "gguf/experts_kernel.cuh"
#include "gguf/gemv_launch.h"

namespace localq::gguf {

// False if not even a ring of two items for four warps has room beside x, so that nothing was launched.
template <class Block>
bool launch_experts(const char* op, ExpertArguments p, uint32_t units, const void* x, void* y, int device,
                    cudaStream_t stream) {
  const DeviceFacts& facts = device_facts(device, op);
  const uint32_t fit = fit_ring<Block>(p, units, facts.shared_bytes_per_block, facts.multiprocessors);
  if (fit == 0) return false;
  launch_tiles<Block>(op, gguf_experts_kernel<Block>, p, units, fit, facts, x, y, device, stream);
  return true;
}

}  // namespace localq::gguf
