// Bindings of the products with weights in GGUF blocks, and of their dequantization; no logic.
#include "common/bind.h"

#include <pybind11/stl.h>

#include <vector>

#include "common/bind_gemv.h"
#include "gguf/experts.h"
#include "gguf/gguf.h"

namespace py = pybind11;

namespace localq {
namespace {

GgufMatrix gguf_of(const py::dict& m) {
  return {address<const uint8_t>(m, "blocks"), address<const uint16_t>(m, "places"), field<int64_t>(m, "out_features"),
          field<int64_t>(m, "in_features"), field<float>(m, "factor")};
}

GgufStack gguf_stack_of(const py::dict& m) {
  return {address<const uint64_t>(m, "blocks"), address<const float>(m, "factors"), field<int64_t>(m, "experts"),
          field<int64_t>(m, "parts"),           field<int64_t>(m, "out_features"),  field<int64_t>(m, "in_features")};
}

}  // namespace

void bind_gguf(py::module_& m) {
  m.def(
      "gguf_gemv",
      [](uintptr_t x, const std::vector<py::dict>& matrices, int block_type, uintptr_t y, int type, int rows, int norm,
         uintptr_t norm_weight, float eps, uintptr_t residual, int activation, const std::vector<uintptr_t>& biases,
         bool y_is_f32, int device, uintptr_t stream) {
        const GemvExtras extras = gemv_extras(norm, norm_weight, eps, residual, activation, biases, y_is_f32);
        std::vector<GgufMatrix> all;
        for (const py::dict& matrix : matrices) all.push_back(gguf_of(matrix));
        gguf_gemv(all.data(), int(all.size()), static_cast<GgufType>(block_type), extras, pointer<const void>(x),
                  pointer<void>(y), static_cast<Type>(type), rows, device, stream_of(stream));
      },
      py::arg("x"), py::arg("matrices"), py::arg("block_type"), py::arg("y"), py::arg("type"), py::arg("rows"),
      py::arg("norm"), py::arg("norm_weight"), py::arg("eps"), py::arg("residual"), py::arg("activation"),
      py::arg("biases"), py::arg("y_is_f32"), py::arg("device"), py::arg("stream"));

  m.def(
      "gguf_dequantize",
      [](const py::dict& matrix, int block_type, uintptr_t out, int type, int64_t row_begin, int64_t row_count,
         int device, uintptr_t stream) {
        gguf_dequantize(gguf_of(matrix), static_cast<GgufType>(block_type), pointer<void>(out), static_cast<Type>(type),
                        row_begin, row_count, device, stream_of(stream));
      },
      py::arg("matrix"), py::arg("block_type"), py::arg("out"), py::arg("type"), py::arg("row_begin"),
      py::arg("row_count"), py::arg("device"), py::arg("stream"));

  m.def(
      "gguf_experts_gate_up",
      [](uintptr_t x, const py::dict& stack, int gate_type, int up_type, int norm, uintptr_t norm_weight, float eps,
         uintptr_t chosen, int active, int activation, uintptr_t gates, uintptr_t y, int type, int device,
         uintptr_t stream) {
        const GgufExpertsGateUp e = {gguf_stack_of(stack),
                                     pointer<const void>(x),
                                     static_cast<NormKind>(norm),
                                     pointer<const void>(norm_weight),
                                     eps,
                                     pointer<const int32_t>(chosen),
                                     active,
                                     static_cast<Activation>(activation),
                                     pointer<float>(gates),
                                     pointer<void>(y)};
        gguf_experts_gate_up(e, static_cast<GgufType>(gate_type), static_cast<GgufType>(up_type),
                             static_cast<Type>(type), device, stream_of(stream));
      },
      py::arg("x"), py::arg("stack"), py::arg("gate_type"), py::arg("up_type"), py::arg("norm"), py::arg("norm_weight"),
      py::arg("eps"), py::arg("chosen"), py::arg("active"), py::arg("activation"), py::arg("gates"), py::arg("y"),
      py::arg("type"), py::arg("device"), py::arg("stream"));

  m.def(
      "gguf_experts_down",
      [](uintptr_t x, const py::dict& stack, int block_type, uintptr_t chosen, uintptr_t weights, int active,
         uintptr_t residual, bool early, uintptr_t y, int type, int device, uintptr_t stream) {
        const GgufExpertsDown e = {gguf_stack_of(stack),
                                   pointer<const void>(x),
                                   pointer<const int32_t>(chosen),
                                   pointer<const float>(weights),
                                   active,
                                   pointer<const void>(residual),
                                   early,
                                   pointer<void>(y)};
        gguf_experts_down(e, static_cast<GgufType>(block_type), static_cast<Type>(type), device, stream_of(stream));
      },
      py::arg("x"), py::arg("stack"), py::arg("block_type"), py::arg("chosen"), py::arg("weights"), py::arg("active"),
      py::arg("residual"), py::arg("early"), py::arg("y"), py::arg("type"), py::arg("device"), py::arg("stream"));
}

}  // namespace localq
