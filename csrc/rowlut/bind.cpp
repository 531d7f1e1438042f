// Bindings of the products and of the unpacking of weights with 16 values a row; no logic.
#include "common/bind.h"

#include <pybind11/stl.h>

#include <tuple>
#include <vector>

#include "common/bind_gemv.h"
#include "rowlut/rowlut.h"

namespace py = pybind11;

namespace localq {

void bind_rowlut(py::module_& m) {
  m.def(
      "rowlut_gemv",
      [](uintptr_t x, const std::vector<std::tuple<uintptr_t, uintptr_t, int64_t, int64_t, bool>>& matrices,
         uintptr_t y, int type, int rows, int norm, uintptr_t norm_weight, float eps, uintptr_t residual,
         int activation, const std::vector<uintptr_t>& biases, bool y_is_f32, int device, uintptr_t stream) {
        const GemvExtras extras = gemv_extras(norm, norm_weight, eps, residual, activation, biases, y_is_f32);
        std::vector<RowLut> all;
        for (const auto& [codes, table, out, in, tiled] : matrices) {
          all.push_back({pointer<const uint8_t>(codes), pointer<const void>(table), out, in, tiled});
        }
        rowlut_gemv(all.data(), int(all.size()), extras, pointer<const void>(x), pointer<void>(y),
                    static_cast<Type>(type), rows, device, stream_of(stream));
      },
      py::arg("x"), py::arg("matrices"), py::arg("y"), py::arg("type"), py::arg("rows"), py::arg("norm"),
      py::arg("norm_weight"), py::arg("eps"), py::arg("residual"), py::arg("activation"), py::arg("biases"),
      py::arg("y_is_f32"), py::arg("device"), py::arg("stream"));

  m.def(
      "rowlut_dequantize",
      [](uintptr_t codes, uintptr_t table, int64_t out_features, int64_t in_features, bool tiled, uintptr_t out,
         int type, int64_t row_begin, int64_t row_count, int device, uintptr_t stream) {
        const RowLut w = {pointer<const uint8_t>(codes), pointer<const void>(table), out_features, in_features, tiled};
        rowlut_dequantize(w, pointer<void>(out), static_cast<Type>(type), row_begin, row_count, device,
                          stream_of(stream));
      },
      py::arg("codes"), py::arg("table"), py::arg("out_features"), py::arg("in_features"), py::arg("tiled"),
      py::arg("out"), py::arg("type"), py::arg("row_begin"), py::arg("row_count"), py::arg("device"),
      py::arg("stream"));
}

}  // namespace localq
