// gguf_gemv of block types of 256 columns whose codes are places in a grid.
#include "gguf/gemv_launch.h"
#include "gguf/grid_blocks.cuh"

namespace localq::gguf {

template bool launch_gemv<IQ2_XXS>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_gemv<IQ2_XS>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_gemv<IQ2_S>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_gemv<IQ3_XXS>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);
template bool launch_gemv<IQ3_S>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);

}  // namespace localq::gguf
