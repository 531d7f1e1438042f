// Bindings of the small operations of a decode step: embed, rmsnorm, dry_match, adjust, sample; no logic.
#include "common/bind.h"

#include "step/embed.h"
#include "step/rmsnorm.h"
#include "step/sampling.h"

namespace py = pybind11;

namespace localq {

void bind_step(py::module_& m) {
  m.def(
      "embed",
      [](uintptr_t ids, uintptr_t table, float scale, uintptr_t out, int type, int64_t rows, int64_t hidden, int device,
         uintptr_t stream) {
        embed(pointer<const int64_t>(ids), pointer<const void>(table), scale, pointer<void>(out),
              static_cast<Type>(type), rows, hidden, device, stream_of(stream));
      },
      py::arg("ids"), py::arg("table"), py::arg("scale"), py::arg("out"), py::arg("type"), py::arg("rows"),
      py::arg("hidden"), py::arg("device"), py::arg("stream"));

  m.def(
      "rmsnorm",
      [](uintptr_t x, int norm, uintptr_t weight, float eps, uintptr_t residual, uintptr_t out, int type, int64_t rows,
         int64_t width, int device, uintptr_t stream) {
        rmsnorm(pointer<const void>(x), static_cast<NormKind>(norm), pointer<const void>(weight), eps,
                pointer<const void>(residual), pointer<void>(out), static_cast<Type>(type), rows, width, device,
                stream_of(stream));
      },
      py::arg("x"), py::arg("norm"), py::arg("weight"), py::arg("eps"), py::arg("residual"), py::arg("out"),
      py::arg("type"), py::arg("rows"), py::arg("width"), py::arg("device"), py::arg("stream"));

  m.def(
      "dry_match",
      [](uintptr_t history, int64_t size, uintptr_t prompt, uintptr_t step, uintptr_t token, uintptr_t window,
         uintptr_t breakers, int longest, uintptr_t matches, uintptr_t diverged, int device, uintptr_t stream) {
        const DryMatch match = {pointer<int32_t>(history),        size,
                                pointer<const int64_t>(prompt),   pointer<const int64_t>(step),
                                pointer<const int64_t>(token),    pointer<const int64_t>(window),
                                pointer<const uint8_t>(breakers), longest,
                                pointer<int32_t>(matches),        pointer<const int32_t>(diverged)};
        dry_match(match, device, stream_of(stream));
      },
      py::arg("history"), py::arg("size"), py::arg("prompt"), py::arg("step"), py::arg("token"), py::arg("window"),
      py::arg("breakers"), py::arg("longest"), py::arg("matches"), py::arg("diverged"), py::arg("device"),
      py::arg("stream"));

  m.def(
      "adjust",
      [](uintptr_t logits, int64_t vocab, float softcap, uintptr_t seen, uintptr_t floats, uintptr_t penalties,
         uintptr_t matches, uintptr_t mask, uintptr_t diverged, int device, uintptr_t stream) {
        const Adjust a = {pointer<float>(logits),
                          vocab,
                          softcap,
                          pointer<const uint8_t>(seen),
                          pointer<const double>(floats),
                          pointer<const float>(penalties),
                          pointer<int32_t>(matches),
                          pointer<const uint32_t>(mask),
                          pointer<const int32_t>(diverged)};
        adjust(a, device, stream_of(stream));
      },
      py::arg("logits"), py::arg("vocab"), py::arg("softcap"), py::arg("seen"), py::arg("floats"), py::arg("penalties"),
      py::arg("matches"), py::arg("mask"), py::arg("diverged"), py::arg("device"), py::arg("stream"));

  m.def(
      "sample",
      [](uintptr_t logits, int64_t vocab, float softcap, uintptr_t seen, uintptr_t uniforms, int64_t capacity,
         uintptr_t step, uintptr_t floats, uintptr_t top_k, uintptr_t chosen, uintptr_t token, uintptr_t position,
         uintptr_t workspace, uintptr_t excludes, bool adjusted, bool follows, uintptr_t draft, uintptr_t diverged,
         bool greedy, int device, uintptr_t stream) {
        const Sample s = {pointer<const float>(logits),
                          vocab,
                          softcap,
                          pointer<uint8_t>(seen),
                          pointer<const double>(uniforms),
                          capacity,
                          pointer<int64_t>(step),
                          pointer<const double>(floats),
                          pointer<const int64_t>(top_k),
                          pointer<int64_t>(chosen),
                          pointer<int64_t>(token),
                          pointer<int64_t>(position),
                          pointer<void>(workspace),
                          pointer<const uint8_t>(excludes),
                          adjusted,
                          follows,
                          pointer<const int64_t>(draft),
                          pointer<int32_t>(diverged)};
        sample(s, greedy, device, stream_of(stream));
      },
      py::arg("logits"), py::arg("vocab"), py::arg("softcap"), py::arg("seen"), py::arg("uniforms"),
      py::arg("capacity"), py::arg("step"), py::arg("floats"), py::arg("top_k"), py::arg("chosen"), py::arg("token"),
      py::arg("position"), py::arg("workspace"), py::arg("excludes"), py::arg("adjusted"), py::arg("follows"),
      py::arg("draft"), py::arg("diverged"), py::arg("greedy"), py::arg("device"), py::arg("stream"));
}

}  // namespace localq
