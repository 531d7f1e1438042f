// W of a matrix in binary codes, in tiles of 16 rows (localq/quant/bcq_tiles.py), bit for bit as localq/quant/bcq.py
// defines it, to f16 or bf16.
//   codes and scales as in gemv.h;  out  T [row_count, in]; in % 8 == 0
// A thread has eight columns of two rows: of each plane a word and a scale of both, and writes 16 bytes in each row;
// sixteen threads' columns lie behind each other, and four share a word.
//
// Bound: memory, planes / 8 bytes and the scales in, 2 bytes per weight out. 3 instructions per weight and plane.
#include "bcq/check.h"
#include "bcq/dequantize_kernel.cuh"

namespace localq {
namespace {

constexpr const char* kOp = "bcq_dequantize";

template <typename T>
void start(const bcq_weights::Arguments& p, void* out, int device, cudaStream_t stream) {
  using namespace bcq_weights;
  const int64_t blocks = (int64_t(p.rows) + kTile - 1) / kTile * p.chunks;
  require(blocks < int64_t(1) << 31, kOp, "row_count", p.rows, "is too large for one launch");
  launch(kOp, device, bcq_dequantize_kernel<T>, dim3(uint32_t(blocks)), dim3(kThreads), 0, stream, p,
         static_cast<T*>(out));
}

}  // namespace

void bcq_dequantize(const BcqMatrix& w, void* out, Type type, int64_t row_begin, int64_t row_count, int device,
                    cudaStream_t stream) {
  bcq::check_matrix(kOp, w);
  require(row_begin >= 0 && row_begin < w.out, kOp, "row_begin", row_begin, "must be a row of the matrix");
  require(row_begin % bcq_weights::kTile == 0, kOp, "row_begin", row_begin, "cuts a tile of 16 rows");
  require(row_count >= 1 && row_count <= w.out - row_begin, kOp, "row_count", row_count, "must be rows that are there");
  require(type != Type::kFloat32, kOp, "dtype", static_cast<int>(type), "must be float16 or bfloat16");
  require_aligned(out, 16, kOp, "out");
  bcq_weights::Arguments p = {};
  p.codes = w.codes, p.scales = static_cast<const uint8_t*>(w.scales);
  p.planes = uint32_t(w.planes), p.layers = p.planes + w.zero_point;
  p.eights = uint32_t(w.in / 8), p.blocks = (p.eights + 15) / 16, p.groups = bcq::groups(w);
  p.group_shift = bcq::group_shift(w);
  p.first_tile = uint32_t(row_begin / bcq_weights::kTile), p.rows = uint32_t(row_count);
  p.chunks = (p.blocks + 1) / 2;
  const DeviceGuard guard(device, kOp);
  if (type == Type::kFloat16) return start<__half>(p, out, device, stream);
  start<__nv_bfloat16>(p, out, device, stream);
}

}  // namespace localq
