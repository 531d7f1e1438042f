// y = x W^T + bias of all entries of a layer, an entry being a token and one of its experts, sorted by expert; W in
// MXFP4, NF4 or 16 bits. Gate and up may be one product, with the gate in the epilogue. Sums in f32 in column order,
// rounded once. Deterministic: the result of an entry depends neither on its place nor on other entries.
//
// A block multiplies 256 (16 bits: 128) rows of one expert with up to 64 of its entries. Which these are it reads on
// the device, so the host waits for nothing: the grid has as many tiles as there can be, and those that there are not
// end at once. Stages of 64 columns of W and x come by cp.async, three of four on their way. A warp has 32 rows, which
// are the operand A of m16n8k16 and are decoded once for all entries: codes in pairs by a table in shared memory,
// scales on the sums. A load of x serves 32 rows.
//
// Per 64 columns a warp spends about 130 instructions on decoding, and per 8 entries 8 products, 8 FFMA (MXFP4: 16) and
// 2 16-byte loads. Bound: memory up to some 32 entries of an expert, then tensor cores.
#include "common/check.h"
#include "experts/gemm_kernel.cuh"

namespace localq {
namespace {

using namespace grouped;

constexpr const char* kOp = "experts_gemm";

template <typename T, class Format>
void launch_format(Arguments p, const ExpertsGemm& e, int device, cudaStream_t stream) {
  constexpr uint32_t kRows = kRowsOfBlock<Format>, kResults = kTokens * kResultStride<Format>;
  const uint32_t budget = device_facts(device, kOp).shared_bytes_per_block;
  const auto bytes = [](uint32_t depth) {
    const uint32_t stages = depth * kStageBytes<Format>;
    return kHeaderBytes<Format> + (stages > kResults ? stages : kResults);
  };
  const auto deepest = [&](uint32_t room) {  // of at least two
    uint32_t depth = kMostStages;
    while (depth > 2 && bytes(depth) > room) --depth;
    return depth;
  };
  p.depth = deepest(budget / 2 - 1024);  // two blocks a multiprocessor
  if (bytes(p.depth) > budget / 2 - 1024) p.depth = deepest(budget);
  require(bytes(p.depth) <= budget, kOp, "device", device, "has too little shared memory");
  const uint32_t rows = p.gated ? kRows / 2 : kRows;
  p.row_blocks = (p.width + rows - 1) / rows;
  const int64_t used = e.entries < e.stack.experts ? e.entries : e.stack.experts;
  const int64_t tiles = used + (e.entries - used) / kTokens;
  require(tiles * p.row_blocks < int64_t(1) << 31, kOp, "entries", e.entries, "are too many");
  launch(kOp, device, experts_gemm_kernel<T, Format>, dim3(uint32_t(tiles) * p.row_blocks), dim3(32 * Format::kWarps),
         bytes(p.depth), stream, p, static_cast<T*>(e.y));
}

template <typename T>
void launch_typed(const Arguments& p, const ExpertsGemm& e, int device, cudaStream_t stream) {
  switch (e.stack.format) {
    case ExpertFormat::kMxfp4:
      return launch_format<T, Mxfp4<T>>(p, e, device, stream);
    case ExpertFormat::kNf4:
      if (p.nested_absmax != nullptr) return launch_format<T, grouped::Nf4<T, true>>(p, e, device, stream);
      return launch_format<T, grouped::Nf4<T, false>>(p, e, device, stream);
    case ExpertFormat::kPlain:
      return launch_format<T, Plain<T>>(p, e, device, stream);
  }
  require(false, kOp, "format", static_cast<int>(e.stack.format), "is unknown");
}

void check(const ExpertsGemm& e, Type type) {
  const ExpertStack& w = e.stack;
  const bool plain = w.format == ExpertFormat::kPlain;
  require(type != Type::kFloat32, kOp, "dtype", static_cast<int>(type), "must be float16 or bfloat16");
  require(w.experts >= 1 && e.first >= 0 && e.first + w.experts <= e.all_experts, kOp, "experts", w.experts,
          "must be positive, and within those of the layer");
  require(e.all_experts <= kMostExperts + 1, kOp, "experts", e.all_experts, "must be at most 513");
  require(w.in >= 8 && w.in <= 1 << 24 && w.in % (plain ? 8 : kStageColumns) == 0, kOp, "in", w.in,
          "must be a positive multiple of 64, or of 8 with 16-bit weights");
  require(w.out >= 8 && w.out <= 1 << 24 && w.out % (e.gated ? 16 : 8) == 0, kOp, "out", w.out,
          "must be a positive multiple of 8, or of 16 with a gate");
  require(e.gate != Gate::kGeluTanh, kOp, "gate", static_cast<int>(e.gate), "must be silu or clamped");
  require(e.entries >= 1 && e.entries <= 1 << 24, kOp, "entries", e.entries, "must be from 1 to 2^24");
  require_aligned(w.codes, 16, kOp, "codes");
  require_aligned(e.x, 16, kOp, "x");
  require_aligned(e.y, 16, kOp, "y");
  if (w.format == ExpertFormat::kMxfp4) require_aligned(w.scales, 2, kOp, "scales");
}

}  // namespace

void experts_gemm(const ExpertsGemm& e, Type type, int device, cudaStream_t stream) {
  check(e, type);
  const ExpertStack& w = e.stack;
  Arguments p = {};
  p.x = static_cast<const uint8_t*>(e.x);
  p.codes = static_cast<const uint8_t*>(w.codes), p.scales = static_cast<const uint8_t*>(w.scales);
  p.nested_absmax = w.nested_absmax, p.nested_map = w.nested_absmax == nullptr ? nullptr : w.nested_map;
  p.code_map = w.code_map, p.offset = w.offset, p.bias = e.bias;
  p.rows = e.rows, p.ends = e.ends, p.tile_ends = e.tile_ends;
  p.first = uint32_t(e.first), p.experts = uint32_t(w.experts), p.all_experts = uint32_t(e.all_experts);
  p.in = uint32_t(w.in), p.row_bytes = uint32_t(w.format == ExpertFormat::kPlain ? 2 * w.in : w.in / 2);
  p.stages = (p.in + kStageColumns - 1) / kStageColumns;
  p.out = uint32_t(w.out), p.width = uint32_t(e.gated ? w.out / 2 : w.out);
  p.gated = e.gated, p.interleaved = e.interleaved, p.clamped = e.gate == Gate::kClamped;
  p.alpha = e.alpha, p.limit = e.limit;
  const DeviceGuard guard(device, kOp);
  if (type == Type::kFloat16) return launch_typed<__half>(p, e, device, stream);
  launch_typed<__nv_bfloat16>(p, e, device, stream);
}

}  // namespace localq
