// Bindings of the products with 4-bit weights that have a scale and a zero point per group, and of their
// dequantization; no logic.
#include "common/bind.h"

#include <pybind11/stl.h>

#include <vector>

#include "common/bind_gemv.h"
#include "int4/int4.h"

namespace py = pybind11;

namespace localq {
namespace {

Int4 int4_of(const py::dict& m) {
  return {address<const uint8_t>(m, "codes"),  address<const void>(m, "scales"),  address<const uint8_t>(m, "zeros"),
          address<const uint16_t>(m, "order"), field<int64_t>(m, "out_features"), field<int64_t>(m, "in_features"),
          field<int64_t>(m, "group")};
}

}  // namespace

void bind_int4(py::module_& m) {
  m.def(
      "int4_gemv",
      [](uintptr_t x, const std::vector<py::dict>& matrices, int stored, uintptr_t y, int type, int rows, int norm,
         uintptr_t norm_weight, float eps, uintptr_t residual, int activation, const std::vector<uintptr_t>& biases,
         bool y_is_f32, int device, uintptr_t stream) {
        const GemvExtras extras = gemv_extras(norm, norm_weight, eps, residual, activation, biases, y_is_f32);
        std::vector<Int4> all;
        for (const py::dict& matrix : matrices) all.push_back(int4_of(matrix));
        int4_gemv(all.data(), int(all.size()), extras, pointer<const void>(x), pointer<void>(y),
                  static_cast<Type>(type), static_cast<Type>(stored), rows, device, stream_of(stream));
      },
      py::arg("x"), py::arg("matrices"), py::arg("stored"), py::arg("y"), py::arg("type"), py::arg("rows"),
      py::arg("norm"), py::arg("norm_weight"), py::arg("eps"), py::arg("residual"), py::arg("activation"),
      py::arg("biases"), py::arg("y_is_f32"), py::arg("device"), py::arg("stream"));

  m.def(
      "int4_dequantize",
      [](const py::dict& matrix, int stored, uintptr_t out, int type, int64_t row_begin, int64_t row_count, int device,
         uintptr_t stream) {
        int4_dequantize(int4_of(matrix), static_cast<Type>(stored), pointer<void>(out), static_cast<Type>(type),
                        row_begin, row_count, device, stream_of(stream));
      },
      py::arg("matrix"), py::arg("stored"), py::arg("out"), py::arg("type"), py::arg("row_begin"), py::arg("row_count"),
      py::arg("device"), py::arg("stream"));
}

}  // namespace localq
