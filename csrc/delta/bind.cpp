// Bindings of gated delta nets; no logic.
#include "common/bind.h"

#include "delta/delta.h"

namespace py = pybind11;

namespace localq {
namespace {

DeltaNet net_of(const py::dict& operands, float eps, int key_heads, int shared) {
  return {address<const void>(operands, "inputs"),
          address<const void>(operands, "gates"),
          address<const void>(operands, "taps"),
          address<const float>(operands, "rates"),
          address<const float>(operands, "offsets"),
          address<const void>(operands, "norm"),
          address<void>(operands, "columns"),
          address<float>(operands, "matrix"),
          address<void>(operands, "out"),
          eps,
          key_heads,
          shared};
}

DeltaStep step_of(const py::dict& operands, float eps, float x_eps, int x_kind, int key_heads, int shared, int hidden) {
  return {net_of(operands, eps, key_heads, shared),
          address<const void>(operands, "x"),
          address<const void>(operands, "x_norm"),
          address<const void>(operands, "write"),
          address<const void>(operands, "decay"),
          address<float>(operands, "heads"),
          address<int32_t>(operands, "arrived"),
          x_eps,
          static_cast<NormKind>(x_kind),
          hidden};
}

}  // namespace

void bind_delta(py::module_& m) {
  m.def(
      "delta_decode",
      [](const py::dict& operands, float eps, float x_eps, int x_kind, int key_heads, int shared, int hidden, int type,
         int device, uintptr_t stream) {
        const DeltaStep step = step_of(operands, eps, x_eps, x_kind, key_heads, shared, hidden);
        delta_decode(step, static_cast<Type>(type), device, stream_of(stream));
      },
      py::arg("operands"), py::arg("eps"), py::arg("x_eps"), py::arg("x_kind"), py::arg("key_heads"), py::arg("shared"),
      py::arg("hidden"), py::arg("type"), py::arg("device"), py::arg("stream"));
  m.def(
      "delta_verify",
      [](const py::dict& operands, float eps, float x_eps, int x_kind, int key_heads, int shared, int hidden,
         int drafted, int rows, int stride, int type, int device, uintptr_t stream) {
        const DeltaRows step = {step_of(operands, eps, x_eps, x_kind, key_heads, shared, hidden),
                                address<void>(operands, "drafted_inputs"),
                                address<float>(operands, "drafted_decay"),
                                address<float>(operands, "drafted_beta"),
                                address<float>(operands, "row_rates"),
                                address<const int64_t>(operands, "position"),
                                address<const int64_t>(operands, "first_drafted"),
                                drafted,
                                rows,
                                stride};
        delta_verify(step, static_cast<Type>(type), device, stream_of(stream));
      },
      py::arg("operands"), py::arg("eps"), py::arg("x_eps"), py::arg("x_kind"), py::arg("key_heads"), py::arg("shared"),
      py::arg("hidden"), py::arg("drafted"), py::arg("rows"), py::arg("stride"), py::arg("type"), py::arg("device"),
      py::arg("stream"));
  m.def(
      "delta_prefill",
      [](const py::dict& operands, float eps, int key_heads, int shared, int tokens, int chunks, int type, int device,
         uintptr_t stream) {
        const DeltaPass pass = {net_of(operands, eps, key_heads, shared),
                                address<const void>(operands, "write"),
                                address<const void>(operands, "decay"),
                                address<void>(operands, "workspace"),
                                tokens,
                                chunks};
        delta_prefill(pass, static_cast<Type>(type), device, stream_of(stream));
      },
      py::arg("operands"), py::arg("eps"), py::arg("key_heads"), py::arg("shared"), py::arg("tokens"),
      py::arg("chunks"), py::arg("type"), py::arg("device"), py::arg("stream"));
}

}  // namespace localq
