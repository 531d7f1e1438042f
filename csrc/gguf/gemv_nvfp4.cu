// gguf_gemv of blocks of NVFP4.
#include "gguf/gemv_launch.h"
#include "gguf/nvfp4_blocks.cuh"

namespace localq::gguf {

template bool launch_gemv<NVFP4>(Arguments, uint32_t, const void*, void*, int, cudaStream_t);

}  // namespace localq::gguf
