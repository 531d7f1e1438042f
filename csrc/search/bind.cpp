// Bindings of the search for codes, and of what codebooks are fitted by; no logic.
#include "common/bind.h"

#include <pybind11/stl.h>

#include <tuple>
#include <vector>

#include "search/adjoint.h"
#include "search/beam_search.h"

namespace py = pybind11;

namespace localq {
namespace {

using Events = std::vector<std::tuple<int, bool>>;      // book, is it the last of its position
using Books = std::vector<std::tuple<uintptr_t, int>>;  // codewords, length

// A block and the events that it points to.
struct Search {
  SearchBlock block;
  std::vector<SearchEvent> events;
};

Search search(uintptr_t targets, uintptr_t feedback, uintptr_t white, uintptr_t tables, uintptr_t tails,
              uintptr_t codes, uintptr_t errors, const Events& events, const Books& books, int64_t rows, int columns,
              int step, int tail, int beam) {
  Search made{search_block(rows, columns, step, tail, beam, int(events.size()), int(books.size())), {}};
  for (const auto& [book, last] : events) made.events.push_back({book, last});
  SearchBlock& block = made.block;
  block.targets = pointer<const float>(targets);
  block.feedback = pointer<const float>(feedback);
  block.white = pointer<const float>(white);
  block.tables = pointer<const float>(tables);
  block.event = made.events.data();
  for (size_t i = 0; i < books.size(); ++i) {
    block.book[i] = pointer<const float>(std::get<0>(books[i]));
    block.length[i] = std::get<1>(books[i]);
  }
  block.tails = pointer<float>(tails);
  block.codes = pointer<uint8_t>(codes);
  block.errors = pointer<float>(errors);
  return made;
}

}  // namespace

void bind_search(py::module_& m) {
  m.def(
      "vq_search_host",
      [](uintptr_t targets, uintptr_t feedback, uintptr_t white, uintptr_t tables, uintptr_t tails, uintptr_t codes,
         uintptr_t errors, const Events& events, const Books& books, int64_t rows, int columns, int step, int tail,
         int beam, int threads) {
        vq_search_host(search(targets, feedback, white, tables, tails, codes, errors, events, books, rows, columns,
                              step, tail, beam)
                           .block,
                       threads);
      },
      py::call_guard<py::gil_scoped_release>(), py::arg("targets"), py::arg("feedback"), py::arg("white"),
      py::arg("tables"), py::arg("tails"), py::arg("codes"), py::arg("errors"), py::arg("events"), py::arg("books"),
      py::arg("rows"), py::arg("columns"), py::arg("step"), py::arg("tail"), py::arg("beam"), py::arg("threads"));

  m.def(
      "vq_search",
      [](uintptr_t targets, uintptr_t feedback, uintptr_t white, uintptr_t tables, uintptr_t tails, uintptr_t codes,
         uintptr_t errors, const Events& events, const Books& books, int64_t rows, int columns, int step, int tail,
         int beam, int device, uintptr_t stream) {
        vq_search(search(targets, feedback, white, tables, tails, codes, errors, events, books, rows, columns, step,
                         tail, beam)
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
