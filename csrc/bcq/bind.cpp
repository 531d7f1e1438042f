// Bindings of the products with binary codes, and of their dequantization; no logic.
#include "common/bind.h"

#include <pybind11/stl.h>

#include <vector>

#include "bcq/gemv.h"
#include "common/bind_gemv.h"

namespace py = pybind11;

namespace localq {
namespace {

BcqMatrix bcq_matrix(const py::dict& m) {
  return {address<const uint8_t>(m, "codes"), address<const void>(m, "scales"), field<int>(m, "planes"),
          field<bool>(m, "zero_point"),       field<int64_t>(m, "group"),       field<int64_t>(m, "out_features"),
          field<int64_t>(m, "in_features")};
}

}  // namespace

void bind_bcq(py::module_& m) {
  m.def(
      "bcq_gemv",
      [](uintptr_t x, const std::vector<py::dict>& matrices, uintptr_t y, int type, int rows, int norm,
         uintptr_t norm_weight, float eps, uintptr_t residual, int activation, const std::vector<uintptr_t>& biases,
         bool y_is_f32, int device, uintptr_t stream) {
        const GemvExtras extras = gemv_extras(norm, norm_weight, eps, residual, activation, biases, y_is_f32);
        std::vector<BcqMatrix> all;
        for (const py::dict& matrix : matrices) all.push_back(bcq_matrix(matrix));
        bcq_gemv(all.data(), int(all.size()), extras, pointer<const void>(x), pointer<void>(y), static_cast<Type>(type),
                 rows, device, stream_of(stream));
      },
      py::arg("x"), py::arg("matrices"), py::arg("y"), py::arg("type"), py::arg("rows"), py::arg("norm"),
      py::arg("norm_weight"), py::arg("eps"), py::arg("residual"), py::arg("activation"), py::arg("biases"),
      py::arg("y_is_f32"), py::arg("device"), py::arg("stream"));

  m.def(
      "bcq_dequantize",
      [](const py::dict& matrix, uintptr_t out, int type, int64_t row_begin, int64_t row_count, int device,
         uintptr_t stream) {
        bcq_dequantize(bcq_matrix(matrix), pointer<void>(out), static_cast<Type>(type), row_begin, row_count, device,
                       stream_of(stream));
      },
      py::arg("matrix"), py::arg("out"), py::arg("type"), py::arg("row_begin"), py::arg("row_count"), py::arg("device"),
      py::arg("stream"));
}

}  // namespace localq
