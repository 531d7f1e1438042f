// Bindings of the products with 16-bit and 8-bit weights; no logic.
#include "common/bind.h"

#include <pybind11/stl.h>

#include <vector>

#include "common/bind_gemv.h"
#include "rows/dense.h"
#include "rows/int8.h"

namespace py = pybind11;

namespace localq {

void bind_dense(py::module_& m) {
  m.def(
      "dense_gemv",
      [](uintptr_t x, const std::vector<py::dict>& matrices, uintptr_t y, int type, int rows, int norm,
         uintptr_t norm_weight, float eps, uintptr_t residual, int activation, const std::vector<uintptr_t>& biases,
         bool y_is_f32, int device, uintptr_t stream) {
        const GemvExtras extras = gemv_extras(norm, norm_weight, eps, residual, activation, biases, y_is_f32);
        std::vector<DenseMatrix> all;
        for (const py::dict& m : matrices) {
          all.push_back(
              {address<const void>(m, "weight"), field<int64_t>(m, "out_features"), field<int64_t>(m, "in_features")});
        }
        dense_gemv(all.data(), int(all.size()), extras, pointer<const void>(x), pointer<void>(y),
                   static_cast<Type>(type), rows, device, stream_of(stream));
      },
      py::arg("x"), py::arg("matrices"), py::arg("y"), py::arg("type"), py::arg("rows"), py::arg("norm"),
      py::arg("norm_weight"), py::arg("eps"), py::arg("residual"), py::arg("activation"), py::arg("biases"),
      py::arg("y_is_f32"), py::arg("device"), py::arg("stream"));

  m.def(
      "int8_gemv",
      [](uintptr_t x, const std::vector<py::dict>& matrices, uintptr_t y, int type, int rows, int norm,
         uintptr_t norm_weight, float eps, uintptr_t residual, int activation, const std::vector<uintptr_t>& biases,
         bool y_is_f32, int device, uintptr_t stream) {
        const GemvExtras extras = gemv_extras(norm, norm_weight, eps, residual, activation, biases, y_is_f32);
        std::vector<Int8Matrix> all;
        for (const py::dict& m : matrices) {
          all.push_back({address<const int8_t>(m, "codes"), address<const float>(m, "scales"),
                         field<int64_t>(m, "out_features"), field<int64_t>(m, "in_features")});
        }
        int8_gemv(all.data(), int(all.size()), extras, pointer<const void>(x), pointer<void>(y),
                  static_cast<Type>(type), rows, device, stream_of(stream));
      },
      py::arg("x"), py::arg("matrices"), py::arg("y"), py::arg("type"), py::arg("rows"), py::arg("norm"),
      py::arg("norm_weight"), py::arg("eps"), py::arg("residual"), py::arg("activation"), py::arg("biases"),
      py::arg("y_is_f32"), py::arg("device"), py::arg("stream"));
}

}  // namespace localq
