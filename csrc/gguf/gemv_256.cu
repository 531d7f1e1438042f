// gguf_gemv of block types of 256 columns.
#include "gguf/gemv_launch.h"
#include "gguf/iq4_blocks.cuh"
#include "gguf/k_blocks.cuh"

namespace localq::gguf {

template bool launch_gemv<Q2_K>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_gemv<Q3_K>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_gemv<Q4_K>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_gemv<Q5_K>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_gemv<Q6_K>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_gemv<IQ4_XS>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_gemv<IQ4_XSWithoutTable>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);

}  // namespace localq::gguf
