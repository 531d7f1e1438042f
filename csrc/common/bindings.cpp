// The Python module localq._C: each family of operations adds itself (*/bind.cpp). Pointers, sizes and the stream come
// as integers, so that the module needs no libtorch; localq/kernels/ checks tensors and takes them apart.
#include "common/bind.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "CUDA kernels of localq; see csrc/README.md";
  m.attr("build_architectures") = LOCALQ_ARCHITECTURES;
  m.attr("build_cuda_version") = LOCALQ_CUDA_VERSION;
  localq::bind_nf4(m);
  localq::bind_dense(m);
  localq::bind_experts(m);
  localq::bind_gather(m);
  localq::bind_int4(m);
  localq::bind_attention(m);
  localq::bind_step(m);
  localq::bind_rowlut(m);
  localq::bind_vq(m);
  localq::bind_bcq(m);
  localq::bind_search(m);
}
