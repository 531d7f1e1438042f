// sums[share][codes[r][h]] += matrix[r][stride * h .. + length): the adjoint of decoding (adjoint.h), which is the
// gradient of a codebook, and half of a step of fitting one.
//   matrix f32 [rows, columns]     codes u8 [rows, positions]     sums f32 [shares, 256, length]
//
// A share of rows is a warp, and a warp is a block. It has a table [256, 32] in shared memory, of which each lane reads
// and writes its own column alone: no two lanes meet in an entry or in a bank, whatever the codes are, and nothing is
// atomic. Lanes beside each other take the weights of a codeword; where it has at most 16, 8, ... of them, several
// positions are taken at a time, and their columns are added at the end. A lane's sums have the order of the positions.
//
// Bound: latency of shared memory. Every position is read, added and written back behind the one before, since nobody
// knows whether they are of one codeword; how many positions are on their way is up to the warps that shared memory
// takes, 32 KB each. A weight is read from memory once and length / stride times from L1.
#include "common/check.h"
#include "common/launch.h"
#include "search/adjoint.h"
#include "search/adjoint_kernel.cuh"

namespace localq {
namespace {

constexpr const char* kOp = "vq_adjoint";
constexpr uint32_t kEntries = kAdjointEntries, kWarp = kAdjointLanes;

__global__ void __launch_bounds__(kWarp) vq_adjoint_kernel(const Adjoint p) {
  __shared__ float table[kEntries * kWarp];
  const uint32_t lane = threadIdx.x;
  for (uint32_t i = lane; i < kEntries * kWarp; i += kWarp) table[i] = 0.f;  // its own column
  release_dependents();
  dependency_wait();
  const uint32_t begin = uint64_t(p.rows) * blockIdx.x / gridDim.x;
  const uint32_t end = uint64_t(p.rows) * (blockIdx.x + 1) / gridDim.x;
#pragma unroll 1
  for (uint32_t row = begin; row < end; ++row) add_row(p, row, lane, table + lane);
  __syncwarp();
  float* const sums = p.sums + uint64_t(blockIdx.x) * kEntries * p.length;
  for (uint32_t i = lane; i < kEntries * p.length; i += kWarp) sums[i] = sum_of_lanes(p, table, i);
}

}  // namespace

void vq_adjoint(const float* matrix, const uint8_t* codes, float* sums, int64_t rows, int64_t columns, int stride,
                int length, int64_t shares, int device, cudaStream_t stream) {
  require(rows >= 1 && rows <= INT32_MAX, kOp, "rows", rows, "must be from 1 to 2^31 - 1");
  require(stride >= 1, kOp, "stride", stride, "must be positive");
  require(length >= 1 && length <= int(kWarp), kOp, "length", length, "must be from 1 to 32");
  require(columns >= stride && columns % stride == 0 && columns <= 1 << 24, kOp, "columns", columns,
          "must be a multiple of the stride, at most 2^24");
  require(shares >= 1 && shares <= rows, kOp, "shares", shares, "must be from 1 to the number of rows");
  require_aligned(matrix, 4, kOp, "matrix");
  require_aligned(codes, 1, kOp, "codes");
  require_aligned(sums, 4, kOp, "sums");
  uint32_t width = 1;
  while (width < uint32_t(length)) width *= 2;
  const Adjoint p = {
      matrix,           codes, sums, uint32_t(rows), uint32_t(columns), uint32_t(columns / stride), uint32_t(stride),
      uint32_t(length), width};
  const DeviceGuard guard(device, kOp);
  launch(kOp, device, vq_adjoint_kernel, dim3(unsigned(shares)), kWarp, 0, stream, p);
}

}  // namespace localq
