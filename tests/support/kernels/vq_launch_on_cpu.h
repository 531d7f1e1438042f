// In place of csrc/common/launch.h, behind vq_machine_on_cpu.cuh: blocks that meet in a result run together, as
// `slices` of a launch's arguments says.
#pragma once

#include <tuple>

#include "lookup/intrinsics.cuh"

namespace localq {

template <typename... Parameters, typename... Arguments>
void launch(const char*, int, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t,
            Arguments... arguments) {
  on_cpu::blocks = grid.x, on_cpu::block_threads = int(block.x);
  on_cpu::body = [&] { kernel(static_cast<Parameters>(arguments)...); };
  const uint32_t together = std::get<0>(std::tie(arguments...)).slices;
  for (uint32_t first = 0; first < grid.x; first += together) {
    on_cpu::run_together(first, together, uint32_t(shared_bytes));
  }
}

}  // namespace localq
