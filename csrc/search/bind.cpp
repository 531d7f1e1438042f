// Bindings of the beam search on a GPU, and of the adjoint of decoding; no logic.
#include "search/adjoint.h"
#include "search/bind_search.h"

namespace py = pybind11;

namespace localq {

void bind_search(py::module_& m) {
  m.def(
      "vq_search",
      [](uintptr_t targets, uintptr_t feedback, uintptr_t white, uintptr_t tables, uintptr_t tails, uintptr_t codes,
         uintptr_t errors, const Events& events, const Books& books, int64_t rows, int columns, int step, int tail,
         int beam, int device, uintptr_t stream) {
        vq_search(bound_search(targets, feedback, white, tables, tails, codes, errors, events, books, rows, columns,
                               step, tail, beam)
                      .block,
                  device, stream_of(stream));
      },
      py::arg("targets"), py::arg("feedback"), py::arg("white"), py::arg("tables"), py::arg("tails"), py::arg("codes"),
      py::arg("errors"), py::arg("events"), py::arg("books"), py::arg("rows"), py::arg("columns"), py::arg("step"),
      py::arg("tail"), py::arg("beam"), py::arg("device"), py::arg("stream"));

  m.def(
      "vq_adjoint",
      [](uintptr_t matrix, uintptr_t codes, uintptr_t sums, int64_t rows, int64_t columns, int stride, int length,
         int64_t shares, int device, uintptr_t stream) {
        vq_adjoint(pointer<const float>(matrix), pointer<const uint8_t>(codes), pointer<float>(sums), rows, columns,
                   stride, length, shares, device, stream_of(stream));
      },
      py::arg("matrix"), py::arg("codes"), py::arg("sums"), py::arg("rows"), py::arg("columns"), py::arg("stride"),
      py::arg("length"), py::arg("shares"), py::arg("device"), py::arg("stream"));
}

}  // namespace localq
