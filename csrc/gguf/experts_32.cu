// Experts in block types of 32 columns.
#include "gguf/experts_launch.h"
#include "gguf/iq4_blocks.cuh"

namespace localq::gguf {

template bool launch_experts<Q4_0>(const char*, ExpertArguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_experts<Q4_1>(const char*, ExpertArguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_experts<Q5_0>(const char*, ExpertArguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_experts<Q5_1>(const char*, ExpertArguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_experts<Q8_0>(const char*, ExpertArguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_experts<IQ4_NL>(const char*, ExpertArguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_experts<IQ4_NLWithoutTable>(const char*, ExpertArguments, uint32_t, const void*, void*, int,
                                                 cudaStream_t);

}  // namespace localq::gguf
