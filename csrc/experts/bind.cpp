// Bindings of mixtures of experts and of MXFP4; no logic.
#include "common/bind.h"

#include <pybind11/stl.h>

#include <vector>

#include "common/bind_gemv.h"
#include "experts/experts.h"
#include "experts/grouped.h"

namespace py = pybind11;

namespace localq {
namespace {

ExpertStack stack_of(const py::dict& m) {
  return {static_cast<ExpertFormat>(field<int>(m, "format")),
          address<const void>(m, "codes"),
          address<const void>(m, "scales"),
          address<const float>(m, "nested_absmax"),
          address<const float>(m, "nested_map"),
          field<float>(m, "offset"),
          address<const float>(m, "code_map"),
          field<int64_t>(m, "experts"),
          field<int64_t>(m, "out_features"),
          field<int64_t>(m, "in_features")};
}

}  // namespace

void bind_experts(py::module_& m) {
  m.def(
      "route",
      [](uintptr_t logits, int64_t experts, int active, int how, uintptr_t weights, uintptr_t chosen, int device,
         uintptr_t stream) {
        route(pointer<const float>(logits), experts, active, static_cast<Weighing>(how), pointer<float>(weights),
              pointer<int32_t>(chosen), device, stream_of(stream));
      },
      py::arg("logits"), py::arg("experts"), py::arg("active"), py::arg("how"), py::arg("weights"), py::arg("chosen"),
      py::arg("device"), py::arg("stream"));

  m.def(
      "router",
      [](uintptr_t x, uintptr_t weight, uintptr_t bias, int norm, uintptr_t norm_weight, float eps, int64_t in_features,
         int64_t experts, int active, int how, uintptr_t workspace, uintptr_t weights, uintptr_t chosen,
         uintptr_t shared_gate, int type, int device, uintptr_t stream) {
        const Router r = {pointer<const void>(x),
                          pointer<const void>(weight),
                          pointer<const void>(bias),
                          static_cast<NormKind>(norm),
                          pointer<const void>(norm_weight),
                          eps,
                          in_features,
                          experts,
                          active,
                          static_cast<Weighing>(how),
                          pointer<int32_t>(workspace),
                          pointer<float>(weights),
                          pointer<int32_t>(chosen),
                          pointer<const void>(shared_gate)};
        router(r, static_cast<Type>(type), device, stream_of(stream));
      },
      py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("norm"), py::arg("norm_weight"), py::arg("eps"),
      py::arg("in_features"), py::arg("experts"), py::arg("active"), py::arg("how"), py::arg("workspace"),
      py::arg("weights"), py::arg("chosen"), py::arg("shared_gate"), py::arg("type"), py::arg("device"),
      py::arg("stream"));

  m.def(
      "experts_gate_up",
      [](uintptr_t x, const py::dict& stack, uintptr_t bias, uintptr_t chosen, int active, int norm,
         uintptr_t norm_weight, float eps, int gate, float alpha, float limit, bool interleaved, uintptr_t y, int type,
         int device, uintptr_t stream) {
        const ExpertsGateUp e = {stack_of(stack),
                                 pointer<const void>(x),
                                 static_cast<NormKind>(norm),
                                 pointer<const void>(norm_weight),
                                 eps,
                                 pointer<const void>(bias),
                                 pointer<const int32_t>(chosen),
                                 active,
                                 static_cast<Gate>(gate),
                                 alpha,
                                 limit,
                                 interleaved,
                                 pointer<void>(y)};
        experts_gate_up(e, static_cast<Type>(type), device, stream_of(stream));
      },
      py::arg("x"), py::arg("stack"), py::arg("bias"), py::arg("chosen"), py::arg("active"), py::arg("norm"),
      py::arg("norm_weight"), py::arg("eps"), py::arg("gate"), py::arg("alpha"), py::arg("limit"),
      py::arg("interleaved"), py::arg("y"), py::arg("type"), py::arg("device"), py::arg("stream"));

  m.def(
      "experts_down",
      [](uintptr_t x, const py::dict& stack, uintptr_t bias, uintptr_t chosen, int active, uintptr_t weights,
         uintptr_t residual, bool early, uintptr_t y, int type, int device, uintptr_t stream) {
        const ExpertsDown e = {stack_of(stack),
                               pointer<const void>(x),
                               pointer<const void>(bias),
                               pointer<const int32_t>(chosen),
                               pointer<const float>(weights),
                               active,
                               pointer<const void>(residual),
                               early,
                               pointer<void>(y)};
        experts_down(e, static_cast<Type>(type), device, stream_of(stream));
      },
      py::arg("x"), py::arg("stack"), py::arg("bias"), py::arg("chosen"), py::arg("active"), py::arg("weights"),
      py::arg("residual"), py::arg("early"), py::arg("y"), py::arg("type"), py::arg("device"), py::arg("stream"));

  m.def(
      "experts_sort",
      [](uintptr_t chosen, int64_t count, int active, int experts, uintptr_t rows, uintptr_t places, uintptr_t ends,
         uintptr_t tile_ends, int device, uintptr_t stream) {
        const ExpertEntries e = {pointer<const int64_t>(chosen),
                                 count,
                                 active,
                                 experts,
                                 pointer<int32_t>(rows),
                                 pointer<int32_t>(places),
                                 pointer<int32_t>(ends),
                                 pointer<int32_t>(tile_ends)};
        experts_sort(e, device, stream_of(stream));
      },
      py::arg("chosen"), py::arg("count"), py::arg("active"), py::arg("experts"), py::arg("rows"), py::arg("places"),
      py::arg("ends"), py::arg("tile_ends"), py::arg("device"), py::arg("stream"));

  m.def(
      "experts_gemm",
      [](uintptr_t x, const py::dict& stack, int64_t first, uintptr_t rows, uintptr_t ends, uintptr_t tile_ends,
         int64_t all_experts, int64_t entries, uintptr_t bias, bool gated, int gate, float alpha, float limit,
         bool interleaved, uintptr_t y, int type, int device, uintptr_t stream) {
        const ExpertsGemm e = {stack_of(stack),
                               first,
                               pointer<const void>(x),
                               pointer<const int32_t>(rows),
                               pointer<const int32_t>(ends),
                               pointer<const int32_t>(tile_ends),
                               all_experts,
                               entries,
                               pointer<const void>(bias),
                               gated,
                               static_cast<Gate>(gate),
                               alpha,
                               limit,
                               interleaved,
                               pointer<void>(y)};
        experts_gemm(e, static_cast<Type>(type), device, stream_of(stream));
      },
      py::arg("x"), py::arg("stack"), py::arg("first"), py::arg("rows"), py::arg("ends"), py::arg("tile_ends"),
      py::arg("all_experts"), py::arg("entries"), py::arg("bias"), py::arg("gated"), py::arg("gate"), py::arg("alpha"),
      py::arg("limit"), py::arg("interleaved"), py::arg("y"), py::arg("type"), py::arg("device"), py::arg("stream"));

  m.def(
      "experts_sum",
      [](uintptr_t x, uintptr_t places, uintptr_t weights, uintptr_t y, int type, int64_t tokens, int active,
         int64_t width, int device, uintptr_t stream) {
        experts_sum(pointer<const void>(x), pointer<const int32_t>(places), pointer<const float>(weights),
                    pointer<void>(y), static_cast<Type>(type), tokens, active, width, device, stream_of(stream));
      },
      py::arg("x"), py::arg("places"), py::arg("weights"), py::arg("y"), py::arg("type"), py::arg("tokens"),
      py::arg("active"), py::arg("width"), py::arg("device"), py::arg("stream"));

  m.def(
      "mxfp4_gemv",
      [](uintptr_t x, const std::vector<py::dict>& matrices, uintptr_t y, int type, int rows, int norm,
         uintptr_t norm_weight, float eps, uintptr_t residual, int activation, const std::vector<uintptr_t>& biases,
         bool y_is_f32, int device, uintptr_t stream) {
        const GemvExtras extras = gemv_extras(norm, norm_weight, eps, residual, activation, biases, y_is_f32);
        std::vector<Mxfp4Matrix> all;
        for (const py::dict& m : matrices) {
          all.push_back({address<const uint8_t>(m, "codes"), address<const uint8_t>(m, "scales"),
                         field<int64_t>(m, "out_features"), field<int64_t>(m, "in_features")});
        }
        mxfp4_gemv(all.data(), int(all.size()), extras, pointer<const void>(x), pointer<void>(y),
                   static_cast<Type>(type), rows, device, stream_of(stream));
      },
      py::arg("x"), py::arg("matrices"), py::arg("y"), py::arg("type"), py::arg("rows"), py::arg("norm"),
      py::arg("norm_weight"), py::arg("eps"), py::arg("residual"), py::arg("activation"), py::arg("biases"),
      py::arg("y_is_f32"), py::arg("device"), py::arg("stream"));

  m.def(
      "mxfp4_dequantize",
      [](uintptr_t codes, uintptr_t scales, uintptr_t out, int type, int64_t count, int device, uintptr_t stream) {
        mxfp4_dequantize(pointer<const uint8_t>(codes), pointer<const uint8_t>(scales), pointer<void>(out),
                         static_cast<Type>(type), count, device, stream_of(stream));
      },
      py::arg("codes"), py::arg("scales"), py::arg("out"), py::arg("type"), py::arg("count"), py::arg("device"),
      py::arg("stream"));
}

}  // namespace localq
