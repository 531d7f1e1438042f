// Experts in block types of 256 columns.
#include "gguf/experts_launch.h"
#include "gguf/iq4_blocks.cuh"
#include "gguf/k_blocks.cuh"

namespace localq::gguf {

template bool launch_experts<Q2_K>(const char*, ExpertArguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_experts<Q3_K>(const char*, ExpertArguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_experts<Q4_K>(const char*, ExpertArguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_experts<Q5_K>(const char*, ExpertArguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_experts<Q6_K>(const char*, ExpertArguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_experts<IQ4_XS>(const char*, ExpertArguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_experts<IQ4_XSWithoutTable>(const char*, ExpertArguments, uint32_t, const void*, void*, int,
                                                 cudaStream_t);

}  // namespace localq::gguf
