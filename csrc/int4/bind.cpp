// Bindings of the products with 4-bit weights that have a scale and a zero point a group, and of their dequantization;
// no logic.
#include "common/bind.h"

#include <pybind11/stl.h>

#include <tuple>
#include <vector>

#include "common/bind_gemv.h"
#include "int4/int4.h"

namespace py = pybind11;

namespace localq {
namespace {

// codes, scales, zeros, order, out, in, group
using Int4Arguments = std::tuple<uintptr_t, uintptr_t, uintptr_t, uintptr_t, int64_t, int64_t, int64_t>;

Int4 int4_of(const Int4Arguments& m) {
  return {pointer<const uint8_t>(std::get<0>(m)),
          pointer<const void>(std::get<1>(m)),
          pointer<const uint8_t>(std::get<2>(m)),
          pointer<const uint16_t>(std::get<3>(m)),
          std::get<4>(m),
          std::get<5>(m),
          std::get<6>(m)};
}

}  // namespace

void bind_int4(py::module_& m) {
  m.def(
      "int4_gemv",
      [](uintptr_t x, const std::vector<Int4Arguments>& matrices, int stored, uintptr_t y, int type, int rows, int norm,
         uintptr_t norm_weight, float eps, uintptr_t residual, int activation, const std::vector<uintptr_t>& biases,
         bool y_is_f32, int device, uintptr_t stream) {
        const GemvExtras extras = gemv_extras(norm, norm_weight, eps, residual, activation, biases, y_is_f32);
        std::vector<Int4> all;
        for (const Int4Arguments& matrix : matrices) all.push_back(int4_of(matrix));
        int4_gemv(all.data(), int(all.size()), extras, pointer<const void>(x), pointer<void>(y),
                  static_cast<Type>(type), static_cast<Type>(stored), rows, device, stream_of(stream));
      },
      py::arg("x"), py::arg("matrices"), py::arg("stored"), py::arg("y"), py::arg("type"), py::arg("rows"),
      py::arg("norm"), py::arg("norm_weight"), py::arg("eps"), py::arg("residual"), py::arg("activation"),
      py::arg("biases"), py::arg("y_is_f32"), py::arg("device"), py::arg("stream"));

  m.def(
      "int4_dequantize",
      [](const Int4Arguments& matrix, int stored, uintptr_t out, int type, int64_t row_begin, int64_t row_count,
         int device, uintptr_t stream) {
        int4_dequantize(int4_of(matrix), static_cast<Type>(stored), pointer<void>(out), static_cast<Type>(type),
                        row_begin, row_count, device, stream_of(stream));
      },
      py::arg("matrix"), py::arg("stored"), py::arg("out"), py::arg("type"), py::arg("row_begin"), py::arg("row_count"),
      py::arg("device"), py::arg("stream"));
}

}  // namespace localq
