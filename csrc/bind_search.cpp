// Bindings of the search for codes; no logic.
#include <pybind11/stl.h>

#include <tuple>
#include <vector>

#include "bind.h"
#include "vq_search.h"

namespace py = pybind11;

namespace localq {

void bind_search(py::module_& m) {
  m.def(
      "vq_search_host",
      [](uintptr_t targets, uintptr_t feedback, uintptr_t white, uintptr_t tables, uintptr_t tails, uintptr_t codes,
         uintptr_t errors, const std::vector<std::tuple<int, bool>>& events,
         const std::vector<std::tuple<uintptr_t, int>>& books, int64_t rows, int columns, int step, int tail, int beam,
         int threads) {
        std::vector<SearchEvent> all;
        for (const auto& [book, last] : events) all.push_back({book, last});
        SearchBlock block = search_block(rows, columns, step, tail, beam, int(events.size()), int(books.size()));
        block.targets = pointer<const float>(targets);
        block.feedback = pointer<const float>(feedback);
        block.white = pointer<const float>(white);
        block.tables = pointer<const float>(tables);
        block.event = all.data();
        for (size_t i = 0; i < books.size(); ++i) {
          block.book[i] = pointer<const float>(std::get<0>(books[i]));
          block.length[i] = std::get<1>(books[i]);
        }
        block.tails = pointer<float>(tails);
        block.codes = pointer<uint8_t>(codes);
        block.errors = pointer<float>(errors);
        vq_search_host(block, threads);
      },
      py::call_guard<py::gil_scoped_release>(), py::arg("targets"), py::arg("feedback"), py::arg("white"),
      py::arg("tables"), py::arg("tails"), py::arg("codes"), py::arg("errors"), py::arg("events"), py::arg("books"),
      py::arg("rows"), py::arg("columns"), py::arg("step"), py::arg("tail"), py::arg("beam"), py::arg("threads"));
}

}  // namespace localq
