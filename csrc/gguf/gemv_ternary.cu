// gguf_gemv of block types whose values are -1, 0 and 1.
#include "gguf/gemv_launch.h"
#include "gguf/ternary_blocks.cuh"

namespace localq::gguf {

template bool launch_gemv<IQ1_S>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_gemv<IQ1_M>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_gemv<TQ1_0>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_gemv<TQ2_0>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);

}  // namespace localq::gguf
