// Bindings of the NF4 operations; no logic.
#include "common/bind.h"

#include <pybind11/stl.h>

#include <utility>
#include <vector>

#include "common/bind_gemv.h"
#include "nf4/nf4.h"

namespace py = pybind11;

namespace localq {
namespace {

Nf4 nf4(const py::dict& m) {
  return {
      address<const uint8_t>(m, "codes"),    address<const void>(m, "absmax"), address<const float>(m, "nested_absmax"),
      address<const float>(m, "nested_map"), field<float>(m, "offset"),        address<const float>(m, "code_map"),
      field<int64_t>(m, "out_features"),     field<int64_t>(m, "in_features"), field<bool>(m, "tiled")};
}

}  // namespace

void bind_nf4(py::module_& m) {
  m.def(
      "nf4_dequantize",
      [](const py::dict& matrix, uintptr_t out, int type, int64_t row_begin, int64_t row_count, int device,
         uintptr_t stream) {
        nf4_dequantize(nf4(matrix), pointer<void>(out), static_cast<Type>(type), row_begin, row_count, device,
                       stream_of(stream));
      },
      py::arg("matrix"), py::arg("out"), py::arg("type"), py::arg("row_begin"), py::arg("row_count"), py::arg("device"),
      py::arg("stream"));

  m.def(
      "nf4_gemv",
      [](uintptr_t x, const std::vector<py::dict>& matrices, uintptr_t y, int type, int rows, int norm,
         uintptr_t norm_weight, float eps, uintptr_t residual, int activation, const std::vector<uintptr_t>& biases,
         bool y_is_f32, int device, uintptr_t stream, std::pair<uintptr_t, int64_t> workspace) {
        const GemvExtras extras = gemv_extras(norm, norm_weight, eps, residual, activation, biases, y_is_f32);
        std::vector<Nf4> all;
        for (const py::dict& matrix : matrices) all.push_back(nf4(matrix));
        nf4_gemv(all.data(), int(all.size()), extras, {pointer<uint32_t>(workspace.first), workspace.second},
                 pointer<const void>(x), pointer<void>(y), static_cast<Type>(type), rows, device, stream_of(stream));
      },
      py::arg("x"), py::arg("matrices"), py::arg("y"), py::arg("type"), py::arg("rows"), py::arg("norm"),
      py::arg("norm_weight"), py::arg("eps"), py::arg("residual"), py::arg("activation"), py::arg("biases"),
      py::arg("y_is_f32"), py::arg("device"), py::arg("stream"),
      py::arg("workspace") = std::pair<uintptr_t, int64_t>());

  m.def(
      "nf4_gemm",
      [](uintptr_t x, const py::dict& matrix, uintptr_t bias, uintptr_t y, int type, int64_t rows, int device,
         uintptr_t stream) {
        nf4_gemm(nf4(matrix), pointer<const void>(bias), pointer<const void>(x), pointer<void>(y),
                 static_cast<Type>(type), rows, device, stream_of(stream));
      },
      py::arg("x"), py::arg("matrix"), py::arg("bias"), py::arg("y"), py::arg("type"), py::arg("rows"),
      py::arg("device"), py::arg("stream"));
}

}  // namespace localq
