// gguf_gemv of block types of 32 columns.
#include "gguf/gemv_launch.h"
#include "gguf/iq4_blocks.cuh"

namespace localq::gguf {

template bool launch_gemv<Q4_0>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_gemv<Q4_1>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_gemv<Q5_0>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_gemv<Q5_1>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_gemv<Q8_0>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_gemv<IQ4_NL>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_gemv<IQ4_NLWithoutTable>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);

}  // namespace localq::gguf
