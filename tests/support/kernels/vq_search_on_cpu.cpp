// csrc/search/beam_search_kernel.cuh on the CPU, as a library for tests/formats/codebooks/test_search_kernel_emulated.py.
#include "cuda_on_cpu.h"
// after the above, which says what the words of CUDA mean
#include "search/beam_search_kernel.cuh"

namespace {

constexpr unsigned char kFill = 0xff;  // NaN where shared memory is read before it is written
constexpr int kGuard = 4096;

template <int kStep>
void search_row(const localq::Search& search, unsigned order, int64_t row) {
  std::vector<unsigned char> memory(search.bytes + kGuard + 16, kFill);
  auto* shared = reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(memory.data()) + 15) / 16 * 16);
  on_cpu::run(32 * search.warps, order,
              [&] { localq::RowSearch<kStep>(search, reinterpret_cast<char*>(shared), row).run(); });
  for (int i = search.bytes; i < search.bytes + kGuard; ++i) {
    if (shared[i] != kFill) throw std::runtime_error("shared memory was written past its end");
  }
}

}  // namespace

// All rows of the block; `event` is read here. Returns what went wrong, or null.
extern "C" const char* search_on_cpu(const localq::SearchBlock* block, unsigned order) try {
  localq::Search search = localq::search_plan(*block);
  for (int i = 0; i < block->events; ++i) {
    search.event[i] = uint8_t(block->event[i].book | (block->event[i].last ? localq::kLastEvent : 0));
  }
  for (int64_t row = 0; row < block->rows; ++row) {
    switch (block->step) {
      case 2:
        search_row<2>(search, order, row);
        break;
      case 4:
        search_row<4>(search, order, row);
        break;
      case 8:
        search_row<8>(search, order, row);
        break;
      default:
        search_row<16>(search, order, row);
    }
  }
  return nullptr;
} catch (const std::runtime_error& error) {
  static char text[200];
  std::strncpy(text, error.what(), sizeof(text) - 1);
  return text;
}
