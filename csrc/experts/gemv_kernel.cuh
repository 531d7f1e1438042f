// gemv.cuh: the kernel, and how it is launched.
#pragma once

#include "experts/activations.cuh"
#include "experts/epilogue.cuh"
#include "experts/formats.cuh"
#include "experts/gemv.cuh"

namespace localq {

template <typename Format, typename T>
__global__ void __launch_bounds__(kBlockThreads, 1)
    block_gemv_kernel(const __grid_constant__ BlockGemv p, const T* x, void* y) {
  const UnitSpan span = unit_span(p);
  const BlockShared s = carve<Format>(shared_memory(), p, span.tiles);
  const ItemRun run = item_run(p, span);
  Format::fill(s.table, p);
  if (!p.early) dependency_wait();  // the choice of experts is of the launch before
  LaneTile item = {nullptr, nullptr, nullptr, kNothing};
  if (run.first < run.end) {
    item = lane_tile<Format>(p, span, run.first / p.items).template from<Format>(run.first % p.items * Format::kSteps);
  }
  Step<Format> ring[Format::kSteps];
#pragma unroll
  for (int i = 0; i < Format::kSteps; ++i) ring[i].load(p, item, i);
  if (p.early) dependency_wait();
  release_dependents();  // only now: see ExpertsDown::early
  const float bias = bias_at<T>(p, span, threadIdx.x);
  const float scale = Format::kSumScale * stage_block_x<Format>(p, s, x);
  stage_biases<T>(p, s, span, bias);
  __syncthreads();
  sum_run<Format>(p, s, span, x, run, item, ring);
  __syncthreads();
  write_results<T>(p, s, span, run, scale, y);
}

// Launches `kernel` with the matrices, extras and units of `p`; items, x and the blocks are planned here.
template <typename Format, typename T>
void launch_blocks(const char* op, void (*kernel)(BlockGemv, const T*, void*), BlockGemv p, const void* x, void* y,
                   int device, cudaStream_t stream) {
  const DeviceFacts& facts = device_facts(device, op);
  const uint32_t budget = uint32_t(facts.shared_bytes_per_block), sms = uint32_t(facts.multiprocessors);
  for (const BlockMatrix& matrix : p.matrix) p.biased |= matrix.bias != nullptr;
  const uint32_t item_bytes = Format::kSteps * kBlockStepBytes;
  p.items = (p.row_bytes + item_bytes - 1) / item_bytes;
  // x in f16 goes on with zeros to the end of the last item, and rows begin at multiples of 128 bytes
  p.x_stride = Format::kHalfX ? p.items * item_bytes * Format::kXWords : p.in * 2;
  const auto bytes = [&](uint32_t units) {
    return header_bytes<Format>() + p.x_rows * p.x_stride + 4 * result_floats(units * p.parts, p.rows);
  };
  if (bytes(1) > budget && !Format::kHalfX && p.extras.norm == NormKind::kNone) p.x_stride = 0;
  require(bytes(1) <= budget, op, "in", p.in, "is too large for the shared memory of this device");
  const uint32_t fit = (budget - bytes(0)) / (bytes(1) - bytes(0));  // units of a block
  const uint32_t waves = (p.units + sms * fit - 1) / (sms * fit), grid = p.units < sms * waves ? p.units : sms * waves;
  const uint32_t needed = bytes((p.units + grid - 1) / grid);
  const uint32_t alone = budget / 2 + 1024;  // two of these are more than there is
  launch(op, device, kernel, dim3(grid), dim3(kBlockThreads), needed > alone ? needed : alone, stream, p,
         static_cast<const T*>(x), y);
}

template <typename Format, typename T>
void launch_block_gemv(const char* op, BlockGemv p, const void* x, void* y, int device, cudaStream_t stream) {
  p.rows = 1;
  launch_blocks<Format, T>(op, block_gemv_kernel<Format, T>, p, x, y, device, stream);
}

}  // namespace localq
