// Experts in block types whose codes are places in a grid.
#include "gguf/experts_launch.h"
#include "gguf/grid_blocks.cuh"

namespace localq::gguf {

template bool launch_experts<IQ2_XXS>(const char*, ExpertArguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_experts<IQ2_XS>(const char*, ExpertArguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_experts<IQ2_S>(const char*, ExpertArguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_experts<IQ3_XXS>(const char*, ExpertArguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_experts<IQ3_S>(const char*, ExpertArguments, uint32_t, const void*, void*, int, cudaStream_t);

}  // namespace localq::gguf
