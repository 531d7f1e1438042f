// The Python module localq._C: each family registers its operations (*/bind.cpp). Pointers, sizes and the stream are
// integers, so the module does not link libtorch; localq/kernels and localq/formats check the tensors and pass their
// addresses. The host part (LOCALQ_NO_CUDA=1) has the operations that run on the CPU, and no architectures.
#include "common/bind.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled operations of localq; see csrc/README.md";
  localq::bind_search_host(m);
#ifndef LOCALQ_CUDA
  m.attr("build_architectures") = "";
  m.attr("build_cuda_version") = "";
#else
  m.attr("build_architectures") = LOCALQ_ARCHITECTURES;
  m.attr("build_cuda_version") = LOCALQ_CUDA_VERSION;
  localq::bind_nf4(m);
  localq::bind_dense(m);
  localq::bind_experts(m);
  localq::bind_gather(m);
  localq::bind_gguf(m);
  localq::bind_int4(m);
  localq::bind_attention(m);
  localq::bind_delta(m);
  localq::bind_step(m);
  localq::bind_scaled(m);
  localq::bind_rowlut(m);
  localq::bind_vq(m);
  localq::bind_bcq(m);
  localq::bind_search(m);
#endif
}
