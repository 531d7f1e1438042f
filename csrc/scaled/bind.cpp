// Bindings of the products with weights whose scales lie apart from their codes, and of their dequantization; no logic.
#include "common/bind.h"

#include <pybind11/stl.h>

#include <vector>

#include "common/bind_gemv.h"
#include "scaled/scaled.h"

namespace py = pybind11;

namespace localq {
namespace {

ScaledMatrix scaled_of(const py::dict& m) {
  return {address<const uint8_t>(m, "codes"),
          address<const uint8_t>(m, "scales"),
          address<const uint8_t>(m, "zeros"),
          address<const float>(m, "factors"),
          field<int64_t>(m, "out_features"),
          field<int64_t>(m, "in_features"),
          field<bool>(m, "by_row"),
          field<bool>(m, "divides"),
          static_cast<Type>(field<int>(m, "through"))};
}

}  // namespace

void bind_scaled(py::module_& m) {
  m.def(
      "scaled_gemv",
      [](uintptr_t x, const std::vector<py::dict>& matrices, int kind, uintptr_t y, int type, int rows, int norm,
         uintptr_t norm_weight, float eps, uintptr_t residual, int activation, const std::vector<uintptr_t>& biases,
         bool y_is_f32, int device, uintptr_t stream) {
        const GemvExtras extras = gemv_extras(norm, norm_weight, eps, residual, activation, biases, y_is_f32);
        std::vector<ScaledMatrix> all;
        for (const py::dict& matrix : matrices) all.push_back(scaled_of(matrix));
        scaled_gemv(all.data(), int(all.size()), static_cast<ScaledKind>(kind), extras, pointer<const void>(x),
                    pointer<void>(y), static_cast<Type>(type), rows, device, stream_of(stream));
      },
      py::arg("x"), py::arg("matrices"), py::arg("kind"), py::arg("y"), py::arg("type"), py::arg("rows"),
      py::arg("norm"), py::arg("norm_weight"), py::arg("eps"), py::arg("residual"), py::arg("activation"),
      py::arg("biases"), py::arg("y_is_f32"), py::arg("device"), py::arg("stream"));

  m.def(
      "scaled_dequantize",
      [](const py::dict& matrix, int kind, uintptr_t out, int type, int64_t row_begin, int64_t row_count, int device,
         uintptr_t stream) {
        scaled_dequantize(scaled_of(matrix), static_cast<ScaledKind>(kind), pointer<void>(out), static_cast<Type>(type),
                          row_begin, row_count, device, stream_of(stream));
      },
      py::arg("matrix"), py::arg("kind"), py::arg("out"), py::arg("type"), py::arg("row_begin"), py::arg("row_count"),
      py::arg("device"), py::arg("stream"));
}

}  // namespace localq
