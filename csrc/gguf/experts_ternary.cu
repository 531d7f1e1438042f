// Experts in block types whose values are -1, 0 and 1.
#include "gguf/experts_launch.h"
#include "gguf/ternary_blocks.cuh"

namespace localq::gguf {

template bool launch_experts<IQ1_S>(const char*, ExpertArguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_experts<IQ1_M>(const char*, ExpertArguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_experts<TQ1_0>(const char*, ExpertArguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_experts<TQ2_0>(const char*, ExpertArguments, uint32_t, const void*, void*, int, cudaStream_t);

}  // namespace localq::gguf
