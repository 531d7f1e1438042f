// Bindings of the products with additive codebooks of 256 codewords, of their dequantization, and of the rotation of
// several rows of x; no logic.
#include "common/bind.h"

#include <pybind11/stl.h>

#include <utility>
#include <vector>

#include "common/bind_gemv.h"
#include "lookup/additive.h"
#include "lookup/dequantize.h"
#include "lookup/experts.h"
#include "lookup/gemv.h"
#include "lookup/hadamard.h"

namespace py = pybind11;

namespace localq {
namespace {

// words, number of words
using WorkspaceArgument = std::pair<uintptr_t, int64_t>;

VqMatrix vq_matrix(const py::dict& m) {
  const auto books = field<std::vector<py::dict>>(m, "books");
  if (books.size() > size_t(kMaxBooks)) throw std::invalid_argument("books: at most 2 are supported");
  VqMatrix w = {{},
                int(books.size()),
                address<const void>(m, "scales"),
                field<bool>(m, "scales_bf16"),
                field<float>(m, "factor"),
                field<int64_t>(m, "out_features"),
                field<int64_t>(m, "in_features")};
  for (size_t i = 0; i < books.size(); ++i) {
    const py::dict& book = books[i];
    w.book[i] = {address<const uint8_t>(book, "codes"), address<const void>(book, "fragments"),
                 field<int64_t>(book, "stride"),        field<int64_t>(book, "steps"),
                 field<int64_t>(book, "before"),        field<int64_t>(book, "tile_positions")};
  }
  return w;
}

VqExperts vq_stack(const py::dict& m) {
  return {vq_matrix(field<py::dict>(m, "like")), address<const VqPlace>(m, "places"), field<int64_t>(m, "experts"),
          field<bool>(m, "shared")};
}

void bind_experts_of_vq(py::module_& m) {
  m.def(
      "vq_experts_gate_up",
      [](uintptr_t x, const py::dict& stack, const WorkspaceArgument& workspace, uintptr_t chosen, int active, int norm,
         uintptr_t norm_weight, float eps, uintptr_t y, int type, int device, uintptr_t stream) {
        const GemvExtras extras = gemv_extras(norm, norm_weight, eps, 0, 0, {}, false);
        const VqWorkspace meeting = {pointer<uint32_t>(workspace.first), workspace.second};
        vq_experts_gate_up(vq_stack(stack), extras, meeting, pointer<const int32_t>(chosen), active,
                           pointer<const void>(x), pointer<void>(y), static_cast<Type>(type), device,
                           stream_of(stream));
      },
      py::arg("x"), py::arg("stack"), py::arg("workspace"), py::arg("chosen"), py::arg("active"), py::arg("norm"),
      py::arg("norm_weight"), py::arg("eps"), py::arg("y"), py::arg("type"), py::arg("device"), py::arg("stream"));

  m.def(
      "vq_experts_down",
      [](uintptr_t x, const py::dict& stack, const WorkspaceArgument& workspace, uintptr_t chosen, uintptr_t weights,
         int active, uintptr_t residual, uintptr_t signs, uintptr_t y, int type, int device, uintptr_t stream) {
        const VqWorkspace meeting = {pointer<uint32_t>(workspace.first), workspace.second};
        vq_experts_down(vq_stack(stack), pointer<const uint8_t>(signs), meeting, pointer<const int32_t>(chosen),
                        pointer<const float>(weights), active, pointer<const void>(x), pointer<const void>(residual),
                        pointer<void>(y), static_cast<Type>(type), device, stream_of(stream));
      },
      py::arg("x"), py::arg("stack"), py::arg("workspace"), py::arg("chosen"), py::arg("weights"), py::arg("active"),
      py::arg("residual"), py::arg("signs"), py::arg("y"), py::arg("type"), py::arg("device"), py::arg("stream"));
}

}  // namespace

void bind_vq(py::module_& m) {
  bind_experts_of_vq(m);
  m.def(
      "vq_gemv",
      [](uintptr_t x, const std::vector<py::dict>& matrices, const WorkspaceArgument& workspace, uintptr_t y, int type,
         int rows, int norm, uintptr_t norm_weight, float eps, uintptr_t residual, int activation,
         const std::vector<uintptr_t>& biases, bool y_is_f32, uintptr_t signs, int device, uintptr_t stream) {
        const GemvExtras extras = gemv_extras(norm, norm_weight, eps, residual, activation, biases, y_is_f32);
        std::vector<VqMatrix> all;
        for (const py::dict& matrix : matrices) all.push_back(vq_matrix(matrix));
        const VqWorkspace meeting = {pointer<uint32_t>(workspace.first), workspace.second};
        vq_gemv(all.data(), int(all.size()), extras, pointer<const uint8_t>(signs), meeting, pointer<const void>(x),
                pointer<void>(y), static_cast<Type>(type), rows, device, stream_of(stream));
      },
      py::arg("x"), py::arg("matrices"), py::arg("workspace"), py::arg("y"), py::arg("type"), py::arg("rows"),
      py::arg("norm"), py::arg("norm_weight"), py::arg("eps"), py::arg("residual"), py::arg("activation"),
      py::arg("biases"), py::arg("y_is_f32"), py::arg("signs"), py::arg("device"), py::arg("stream"));

  m.def(
      "vq_dequantize",
      [](const std::vector<py::dict>& books, uintptr_t scales, int64_t out_features, int64_t in_features, bool rounded,
         int stored, uintptr_t out, int type, int64_t row_begin, int64_t row_count, int device, uintptr_t stream) {
        TiledMatrix w = {{}, int(books.size()), pointer<const void>(scales), out_features, in_features, rounded};
        for (size_t i = 0; i < books.size() && i < 2; ++i) {
          const py::dict& book = books[i];
          w.book[i] = {address<const uint8_t>(book, "codes"), address<const void>(book, "codebook"),
                       field<int64_t>(book, "entries"),       field<int64_t>(book, "length"),
                       field<int64_t>(book, "stride"),        field<int64_t>(book, "before"),
                       field<int64_t>(book, "tile_positions")};
        }
        vq_dequantize(w, static_cast<Type>(stored), pointer<void>(out), static_cast<Type>(type), row_begin, row_count,
                      device, stream_of(stream));
      },
      py::arg("books"), py::arg("scales"), py::arg("out_features"), py::arg("in_features"), py::arg("rounded"),
      py::arg("stored"), py::arg("out"), py::arg("type"), py::arg("row_begin"), py::arg("row_count"), py::arg("device"),
      py::arg("stream"));

  m.def(
      "additive_dequantize",
      [](const std::vector<py::dict>& sets, uintptr_t scales, int64_t out_features, int64_t in_features,
         int64_t out_group, bool rounded, int stored, uintptr_t out, int type, int64_t row_begin, int64_t row_count,
         int device, uintptr_t stream) {
        Additive w = {};
        w.sets = int(sets.size());
        for (size_t i = 0; i < sets.size() && i < 2; ++i) {
          const py::dict& set = sets[i];
          w.set[i] = {address<const void>(set, "codes"),
                      address<const void>(set, "codebooks"),
                      field<int64_t>(set, "books"),
                      field<int64_t>(set, "entries"),
                      field<int64_t>(set, "length"),
                      field<int64_t>(set, "stride"),
                      field<bool>(set, "wide"),
                      0,
                      0};
        }
        w.scales = pointer<const void>(scales);
        w.out = out_features, w.in = in_features, w.out_group = out_group, w.rounded = rounded;
        additive_dequantize(w, static_cast<Type>(stored), pointer<void>(out), static_cast<Type>(type), row_begin,
                            row_count, device, stream_of(stream));
      },
      py::arg("sets"), py::arg("scales"), py::arg("out_features"), py::arg("in_features"), py::arg("out_group"),
      py::arg("rounded"), py::arg("stored"), py::arg("out"), py::arg("type"), py::arg("row_begin"),
      py::arg("row_count"), py::arg("device"), py::arg("stream"));

  m.def(
      "hadamard",
      [](uintptr_t x, uintptr_t signs, uintptr_t out, int type, int64_t rows, int64_t columns, int device,
         uintptr_t stream) {
        hadamard(pointer<const void>(x), pointer<const uint8_t>(signs), pointer<void>(out), static_cast<Type>(type),
                 rows, columns, device, stream_of(stream));
      },
      py::arg("x"), py::arg("signs"), py::arg("out"), py::arg("type"), py::arg("rows"), py::arg("columns"),
      py::arg("device"), py::arg("stream"));
}

}  // namespace localq
