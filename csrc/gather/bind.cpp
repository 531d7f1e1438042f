// Bindings of the products that gather codewords (AQLM 1x16, VPTQ), and of the dequantization of VPTQ; no logic.
#include "common/bind.h"

#include <pybind11/stl.h>

#include <vector>

#include "common/bind_gemv.h"
#include "gather/gemv.h"
#include "gather/vptq.h"

namespace py = pybind11;

namespace localq {
namespace {

GatherMatrix gather_matrix(const py::dict& m) {
  return {address<const uint16_t>(m, "codes"), address<const void>(m, "codebooks"), address<const void>(m, "scales"),
          field<int64_t>(m, "out_features"),   field<int64_t>(m, "in_features"),    field<int64_t>(m, "entries"),
          field<int64_t>(m, "group")};
}

Vptq vptq_of(const py::dict& m) {
  return {address<const void>(m, "indices"),
          address<const uint16_t>(m, "res_indices"),
          address<const void>(m, "centroids"),
          address<const void>(m, "res_centroids"),
          address<const uint16_t>(m, "outlier_indices"),
          address<const void>(m, "outlier_centroids"),
          address<const uint16_t>(m, "places"),
          address<const void>(m, "weight_scale"),
          address<const void>(m, "weight_bias"),
          field<int64_t>(m, "out_features"),
          field<int64_t>(m, "in_features"),
          field<int64_t>(m, "groups"),
          field<int64_t>(m, "group_size"),
          field<int64_t>(m, "words"),
          field<int64_t>(m, "vector_len"),
          field<int64_t>(m, "count"),
          field<int64_t>(m, "residuals"),
          field<int64_t>(m, "outliers"),
          field<int64_t>(m, "outlier_len"),
          field<int64_t>(m, "outlier_count")};
}

}  // namespace

void bind_gather(py::module_& m) {
  m.def(
      "vptq_dequantize",
      [](const py::dict& matrix, int stored, uintptr_t out, int type, int64_t row_begin, int64_t row_count, int device,
         uintptr_t stream) {
        vptq_dequantize(vptq_of(matrix), static_cast<Type>(stored), pointer<void>(out), static_cast<Type>(type),
                        row_begin, row_count, device, stream_of(stream));
      },
      py::arg("matrix"), py::arg("stored"), py::arg("out"), py::arg("type"), py::arg("row_begin"), py::arg("row_count"),
      py::arg("device"), py::arg("stream"));

  m.def(
      "gather_gemv",
      [](uintptr_t x, const std::vector<py::dict>& matrices, uintptr_t y, int type, int rows, int norm,
         uintptr_t norm_weight, float eps, uintptr_t residual, int activation, const std::vector<uintptr_t>& biases,
         bool y_is_f32, int device, uintptr_t stream) {
        const GemvExtras extras = gemv_extras(norm, norm_weight, eps, residual, activation, biases, y_is_f32);
        std::vector<GatherMatrix> all;
        for (const py::dict& matrix : matrices) all.push_back(gather_matrix(matrix));
        gather_gemv(all.data(), int(all.size()), extras, pointer<const void>(x), pointer<void>(y),
                    static_cast<Type>(type), rows, device, stream_of(stream));
      },
      py::arg("x"), py::arg("matrices"), py::arg("y"), py::arg("type"), py::arg("rows"), py::arg("norm"),
      py::arg("norm_weight"), py::arg("eps"), py::arg("residual"), py::arg("activation"), py::arg("biases"),
      py::arg("y_is_f32"), py::arg("device"), py::arg("stream"));

  m.def(
      "vptq_gemv",
      [](uintptr_t x, const std::vector<py::dict>& matrices, uintptr_t y, int type, int rows, int norm,
         uintptr_t norm_weight, float eps, uintptr_t residual, int activation, const std::vector<uintptr_t>& biases,
         bool y_is_f32, int device, uintptr_t stream) {
        const GemvExtras extras = gemv_extras(norm, norm_weight, eps, residual, activation, biases, y_is_f32);
        std::vector<Vptq> all;
        for (const py::dict& each : matrices) all.push_back(vptq_of(each));
        vptq_gemv(all.data(), int(all.size()), extras, pointer<const void>(x), pointer<void>(y),
                  static_cast<Type>(type), rows, device, stream_of(stream));
      },
      py::arg("x"), py::arg("matrices"), py::arg("y"), py::arg("type"), py::arg("rows"), py::arg("norm"),
      py::arg("norm_weight"), py::arg("eps"), py::arg("residual"), py::arg("activation"), py::arg("biases"),
      py::arg("y_is_f32"), py::arg("device"), py::arg("stream"));

  m.def(
      "gather_roof",
      [](uintptr_t table, int64_t bytes, int step, int loads, int64_t threads, uintptr_t sums, int device,
         uintptr_t stream) {
        gather_roof(pointer<const void>(table), bytes, step, loads, threads, pointer<uint32_t>(sums), device,
                    stream_of(stream));
      },
      py::arg("table"), py::arg("bytes"), py::arg("step"), py::arg("loads"), py::arg("threads"), py::arg("sums"),
      py::arg("device"), py::arg("stream"));
}

}  // namespace localq
