// Bindings of decode attention and the quantized KV cache; no logic.
#include "common/bind.h"

#include <pybind11/stl.h>

#include <tuple>

#include "attention/attention.h"

namespace py = pybind11;

namespace localq {
namespace {

// k, v, k_scales, v_scales, key_bits, value_bits, kv_heads, head_dim, capacity
using Layer = std::tuple<uintptr_t, uintptr_t, uintptr_t, uintptr_t, int, int, int, int, int64_t>;
// kind, weight, eps
using Norm = std::tuple<int, uintptr_t, float>;

KvLayer kv_layer(const Layer& l) {
  return {pointer<void>(std::get<0>(l)),
          pointer<void>(std::get<1>(l)),
          pointer<void>(std::get<2>(l)),
          pointer<void>(std::get<3>(l)),
          std::get<4>(l),
          std::get<6>(l),
          std::get<7>(l),
          std::get<5>(l),
          std::get<8>(l)};
}

}  // namespace

void bind_attention(py::module_& m) {
  m.def("attention_splits", &attention_splits, py::arg("kv_heads"), py::arg("device"));
  m.def("attention_partials", &attention_partials, py::arg("heads"), py::arg("kv_heads"), py::arg("head_dim"),
        py::arg("splits"));

  m.def(
      "attention_decode",
      [](uintptr_t qkv, const Layer& layer, uintptr_t position, uintptr_t base, int heads, int q_stride, uintptr_t gate,
         int gate_stride, int gate_row_stride, uintptr_t rotary, int rotary_dim, uintptr_t sinks, const Norm& q_norm,
         const Norm& k_norm, float scale, float softcap, int window, uintptr_t partials, uintptr_t arrived, int splits,
         int rows, uintptr_t out, int type, int device, uintptr_t stream) {
        AttentionStep step = {};
        step.qkv = pointer<const void>(qkv);
        step.position = pointer<const int64_t>(position);
        step.base = pointer<const int64_t>(base);
        step.rotary = pointer<const void>(rotary);
        step.rotary_dim = rotary_dim;
        step.sinks = pointer<const void>(sinks);
        step.heads = heads;
        step.q_stride = q_stride;
        step.gate = pointer<const void>(gate);
        step.gate_stride = gate_stride;
        step.gate_row_stride = gate_row_stride;
        step.q_norm = static_cast<NormKind>(std::get<0>(q_norm));
        step.k_norm = static_cast<NormKind>(std::get<0>(k_norm));
        step.q_norm_weight = pointer<const void>(std::get<1>(q_norm));
        step.k_norm_weight = pointer<const void>(std::get<1>(k_norm));
        step.q_eps = std::get<2>(q_norm);
        step.k_eps = std::get<2>(k_norm);
        step.scale = scale;
        step.softcap = softcap;
        step.window = window;
        step.out = pointer<void>(out);
        step.partials = pointer<float>(partials);
        step.arrived = pointer<int>(arrived);
        step.splits = splits;
        step.rows = rows;
        attention_decode(step, kv_layer(layer), static_cast<Type>(type), device, stream_of(stream));
      },
      py::arg("qkv"), py::arg("layer"), py::arg("position"), py::arg("base"), py::arg("heads"), py::arg("q_stride"),
      py::arg("gate"), py::arg("gate_stride"), py::arg("gate_row_stride"), py::arg("rotary"), py::arg("rotary_dim"),
      py::arg("sinks"), py::arg("q_norm"), py::arg("k_norm"), py::arg("scale"), py::arg("softcap"), py::arg("window"),
      py::arg("partials"), py::arg("arrived"), py::arg("splits"), py::arg("rows"), py::arg("out"), py::arg("type"),
      py::arg("device"), py::arg("stream"));

  m.def(
      "kv_write",
      [](const Layer& layer, uintptr_t k, uintptr_t v, int64_t k_stride, int64_t v_stride, uintptr_t slots, int tokens,
         int type, int device, uintptr_t stream) {
        kv_write(kv_layer(layer), pointer<const void>(k), pointer<const void>(v), k_stride, v_stride,
                 pointer<const int64_t>(slots), tokens, static_cast<Type>(type), device, stream_of(stream));
      },
      py::arg("layer"), py::arg("k"), py::arg("v"), py::arg("k_stride"), py::arg("v_stride"), py::arg("slots"),
      py::arg("tokens"), py::arg("type"), py::arg("device"), py::arg("stream"));

  m.def(
      "kv_read",
      [](const Layer& layer, uintptr_t k, uintptr_t v, int64_t live, int type, int device, uintptr_t stream) {
        kv_read(kv_layer(layer), pointer<void>(k), pointer<void>(v), live, static_cast<Type>(type), device,
                stream_of(stream));
      },
      py::arg("layer"), py::arg("k"), py::arg("v"), py::arg("live"), py::arg("type"), py::arg("device"),
      py::arg("stream"));
}

}  // namespace localq
