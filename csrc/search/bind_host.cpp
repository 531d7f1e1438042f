// Binding of the beam search on the CPU; no logic.
#include "search/bind_search.h"

namespace py = pybind11;

namespace localq {

void bind_search_host(py::module_& m) {
  m.def(
      "vq_search_host",
      [](uintptr_t targets, uintptr_t feedback, uintptr_t white, uintptr_t tables, uintptr_t tails, uintptr_t codes,
         uintptr_t errors, const Events& events, const Books& books, int64_t rows, int columns, int step, int tail,
         int beam, int threads) {
        vq_search_host(bound_search(targets, feedback, white, tables, tails, codes, errors, events, books, rows,
                                    columns, step, tail, beam)
                           .block,
                       threads);
      },
      py::call_guard<py::gil_scoped_release>(), py::arg("targets"), py::arg("feedback"), py::arg("white"),
      py::arg("tables"), py::arg("tails"), py::arg("codes"), py::arg("errors"), py::arg("events"), py::arg("books"),
      py::arg("rows"), py::arg("columns"), py::arg("step"), py::arg("tail"), py::arg("beam"), py::arg("threads"));
}

}  // namespace localq
