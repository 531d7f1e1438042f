// The Python module localq._C: one m.def per operation, arguments named, no logic. Pointers, sizes and the stream come
// as integers, so that the module needs no libtorch; localq/kernels/ops.py checks tensors and takes them apart.
#include <pybind11/pybind11.h>

#include "launchers.h"

namespace py = pybind11;
using localq::Nf4;
using localq::Type;

namespace {

template <typename T>
const T* pointer(uintptr_t address) {
  return reinterpret_cast<const T*>(address);
}

Nf4 nf4(uintptr_t codes, uintptr_t absmax, uintptr_t nested_absmax, uintptr_t nested_map, float offset,
        uintptr_t code_map) {
  return {
      pointer<uint8_t>(codes), pointer<void>(absmax), pointer<float>(nested_absmax), pointer<float>(nested_map), offset,
      pointer<float>(code_map)};
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "CUDA kernels of localq; see csrc/README.md";
  m.attr("build_architectures") = LOCALQ_ARCHITECTURES;
  m.attr("build_cuda_version") = LOCALQ_CUDA_VERSION;

  m.def(
      "nf4_dequantize",
      [](uintptr_t codes, uintptr_t absmax, uintptr_t nested_absmax, uintptr_t nested_map, float offset,
         uintptr_t code_map, uintptr_t out, int type, int64_t n, int device, uintptr_t stream) {
        localq::nf4_dequantize(nf4(codes, absmax, nested_absmax, nested_map, offset, code_map),
                               reinterpret_cast<void*>(out), static_cast<Type>(type), n, device,
                               reinterpret_cast<cudaStream_t>(stream));
      },
      py::arg("codes"), py::arg("absmax"), py::arg("nested_absmax"), py::arg("nested_map"), py::arg("offset"),
      py::arg("code_map"), py::arg("out"), py::arg("type"), py::arg("n"), py::arg("device"), py::arg("stream"));

  m.def(
      "nf4_gemv",
      [](uintptr_t x, uintptr_t codes, uintptr_t absmax, uintptr_t nested_absmax, uintptr_t nested_map, float offset,
         uintptr_t code_map, uintptr_t bias, uintptr_t y, int type, int rows, int64_t out, int64_t in, int device,
         uintptr_t stream) {
        localq::nf4_gemv(nf4(codes, absmax, nested_absmax, nested_map, offset, code_map), pointer<void>(x),
                         pointer<void>(bias), reinterpret_cast<void*>(y), static_cast<Type>(type), rows, out, in,
                         device, reinterpret_cast<cudaStream_t>(stream));
      },
      py::arg("x"), py::arg("codes"), py::arg("absmax"), py::arg("nested_absmax"), py::arg("nested_map"),
      py::arg("offset"), py::arg("code_map"), py::arg("bias"), py::arg("y"), py::arg("type"), py::arg("rows"),
      py::arg("out"), py::arg("in"), py::arg("device"), py::arg("stream"));
}
