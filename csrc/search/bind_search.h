// A search block from Python's arguments, for the bindings of the host and of the GPU.
#pragma once

#include <pybind11/stl.h>

#include <tuple>
#include <vector>

#include "common/bind.h"
#include "search/beam_search.h"

namespace localq {

using Events = std::vector<std::tuple<int, bool>>;      // book, whether it is the last of its position
using Books = std::vector<std::tuple<uintptr_t, int>>;  // codewords, length

// A block and the events that it points to.
struct BoundSearch {
  SearchBlock block;
  std::vector<SearchEvent> events;
};

inline BoundSearch bound_search(uintptr_t targets, uintptr_t feedback, uintptr_t white, uintptr_t tables,
                                uintptr_t tails, uintptr_t codes, uintptr_t errors, const Events& events,
                                const Books& books, int64_t rows, int columns, int step, int tail, int beam) {
  BoundSearch made{search_block(rows, columns, step, tail, beam, int(events.size()), int(books.size())), {}};
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

}  // namespace localq
