// Experts in blocks of NVFP4.
#include "gguf/experts_launch.h"
#include "gguf/nvfp4_blocks.cuh"

namespace localq::gguf {

template bool launch_experts<NVFP4>(const char*, ExpertArguments, uint32_t, const void*, void*, int, cudaStream_t);

}  // namespace localq::gguf
