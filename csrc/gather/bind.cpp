// Bindings of the formats with codebooks: to plain weights, and the products that gather; no logic.
#include "common/bind.h"

#include <pybind11/stl.h>

#include <array>
#include <tuple>
#include <utility>
#include <vector>

#include "common/bind_gemv.h"
#include "gather/gemv.h"
#include "gather/vptq.h"

namespace py = pybind11;

namespace localq {
namespace {

// codes, codebook, scales, out, in, entries, group
using GatherArguments = std::tuple<uintptr_t, uintptr_t, uintptr_t, int64_t, int64_t, int64_t, int64_t>;
// Addresses: indices, res_indices, centroids, res_centroids, outlier_indices, outlier_centroids, places, scale, bias.
// Sizes: out, in, groups, group_size, words, vector_len, count, residuals, outliers, outlier_len, outlier_count.
using VptqArguments = std::pair<std::array<uintptr_t, 9>, std::array<int64_t, 11>>;

Vptq vptq_of(const VptqArguments& given) {
  const auto& [at, size] = given;
  return {pointer<const void>(at[0]),
          pointer<const uint16_t>(at[1]),
          pointer<const void>(at[2]),
          pointer<const void>(at[3]),
          pointer<const uint16_t>(at[4]),
          pointer<const void>(at[5]),
          pointer<const uint16_t>(at[6]),
          pointer<const void>(at[7]),
          pointer<const void>(at[8]),
          size[0],
          size[1],
          size[2],
          size[3],
          size[4],
          size[5],
          size[6],
          size[7],
          size[8],
          size[9],
          size[10]};
}

}  // namespace

void bind_gather(py::module_& m) {
  m.def(
      "vptq_dequantize",
      [](const VptqArguments& matrix, int stored, uintptr_t out, int type, int64_t row_begin, int64_t row_count,
         int device, uintptr_t stream) {
        vptq_dequantize(vptq_of(matrix), static_cast<Type>(stored), pointer<void>(out), static_cast<Type>(type),
                        row_begin, row_count, device, stream_of(stream));
      },
      py::arg("matrix"), py::arg("stored"), py::arg("out"), py::arg("type"), py::arg("row_begin"), py::arg("row_count"),
      py::arg("device"), py::arg("stream"));

  m.def(
      "gather_gemv",
      [](uintptr_t x, const std::vector<GatherArguments>& matrices, uintptr_t y, int type, int rows, int norm,
         uintptr_t norm_weight, float eps, uintptr_t residual, int activation, const std::vector<uintptr_t>& biases,
         bool y_is_f32, int device, uintptr_t stream) {
        const GemvExtras extras = gemv_extras(norm, norm_weight, eps, residual, activation, biases, y_is_f32);
        std::vector<GatherMatrix> all;
        for (const auto& [codes, codebook, scales, out, in, entries, group] : matrices) {
          all.push_back({pointer<const uint16_t>(codes), pointer<const void>(codebook), pointer<const void>(scales),
                         out, in, entries, group});
        }
        gather_gemv(all.data(), int(all.size()), extras, pointer<const void>(x), pointer<void>(y),
                    static_cast<Type>(type), rows, device, stream_of(stream));
      },
      py::arg("x"), py::arg("matrices"), py::arg("y"), py::arg("type"), py::arg("rows"), py::arg("norm"),
      py::arg("norm_weight"), py::arg("eps"), py::arg("residual"), py::arg("activation"), py::arg("biases"),
      py::arg("y_is_f32"), py::arg("device"), py::arg("stream"));

  m.def(
      "vptq_gemv",
      [](uintptr_t x, const std::vector<VptqArguments>& matrices, uintptr_t y, int type, int rows, int norm,
         uintptr_t norm_weight, float eps, uintptr_t residual, int activation, const std::vector<uintptr_t>& biases,
         bool y_is_f32, int device, uintptr_t stream) {
        const GemvExtras extras = gemv_extras(norm, norm_weight, eps, residual, activation, biases, y_is_f32);
        std::vector<Vptq> all;
        for (const VptqArguments& each : matrices) all.push_back(vptq_of(each));
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
