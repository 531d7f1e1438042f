// W of VPTQ (localq/quant/vptq.py) to f16, bf16 or f32: any vector length, groups, residuals, outliers, permutation and
// norm, indices packed or not.
//   tables and norm  S, all of one type;  the rest as in vptq.h
//   out              O [row_count, in]
// A thread makes one column of one vector: its lane neighbours write neighbouring columns, so their rows are written in
// whole sectors.
// The definition's roundings, each to S: main + residual, that * scale, that + bias; the result to O. Indices are cut
// to the last entry: none reads out of bounds. Bound: the gather. A sector of 32 bytes from L2 for each codeword of 8
// or 16 values, two with residuals, and 16-bit reads of indices in the order of the columns from L1; 1 to 2 bytes per
// weight are written and 1/4 to 1/2 read.
#include "common/check.h"
#include "common/launch.h"
#include "common/rounding.cuh"
#include "gather/vptq.h"
#include "gather/vptq_indices.cuh"

namespace localq {
namespace {

constexpr const char* kOp = "vptq_dequantize";
constexpr int kThreads = 256, kBlocksPerMultiprocessor = 4;

struct Arguments {
  const void* indices;
  const uint16_t* res_indices;
  const void *centroids, *res_centroids;
  const uint16_t* outlier_indices;
  const void* outlier_centroids;
  const uint16_t* places;
  const void *scale, *bias;
  uint32_t in, group_size, words, vectors, vector_len, count, residuals, outliers, outlier_len, outlier_count;
  uint32_t main_bits, bits;  // packed: of a main index, of both
  uint32_t first, end;       // rows of the slab
};

// The main and the residual index of vector `vector` at place `j` of group `group`.
__device__ __forceinline__ uint2 indices_at(const Arguments& p, uint32_t group, uint32_t vector, uint32_t j) {
  const uint64_t row = uint64_t(group) * p.vectors + vector;
  uint2 found = {0, 0};
  if (p.words == 0) {
    const uint64_t at = row * p.group_size + j;
    found.x = static_cast<const uint16_t*>(p.indices)[at];
    if (p.res_indices != nullptr) found.y = p.res_indices[at];
  } else {
    const uint32_t both = packed_index(static_cast<const uint32_t*>(p.indices) + row * p.words, j, p.bits);
    found.x = both & ((1u << p.main_bits) - 1);
    found.y = both >> p.main_bits;
  }
  return {min(found.x, p.count - 1), p.residuals == 0 ? 0 : min(found.y, p.residuals - 1)};
}

// Weights t .. t + kRun - 1 of a codeword, in f32: main, or main + residual rounded to S.
template <typename S, int kRun>
__device__ __forceinline__ void codeword(float (&q)[kRun], const Arguments& p, uint32_t group, uint2 index,
                                         uint32_t t) {
  const uint64_t main = (uint64_t(group) * p.count + index.x) * p.vector_len + t;
  const auto values = *reinterpret_cast<const Run<S, kRun>*>(static_cast<const S*>(p.centroids) + main);
#pragma unroll
  for (int i = 0; i < kRun; ++i) q[i] = to_float(values.value[i]);
  if (p.residuals == 0) return;
  const uint64_t residual = (uint64_t(group) * p.residuals + index.y) * p.vector_len + t;
  const auto more = *reinterpret_cast<const Run<S, kRun>*>(static_cast<const S*>(p.res_centroids) + residual);
#pragma unroll
  for (int i = 0; i < kRun; ++i) q[i] = rounded<S>(__fadd_rn(q[i], to_float(more.value[i])));
}

// The weight of row `row` at place `k` of the outliers.
template <typename S>
__device__ __forceinline__ float outlier(const Arguments& p, uint32_t row, uint32_t k) {
  const uint32_t vector = row / p.outlier_len;
  const uint32_t index = min(uint32_t(p.outlier_indices[uint64_t(vector) * p.outliers + k]), p.outlier_count - 1);
  return to_float(static_cast<const S*>(p.outlier_centroids)[index * p.outlier_len + row - vector * p.outlier_len]);
}

// Column `column` of one vector, whose place is `k`.
template <typename S, typename O, int kRun>
__device__ __forceinline__ void write_vector(const Arguments& p, uint32_t vector, uint32_t k, uint32_t column, O* out) {
  const bool normed = p.scale != nullptr;
  const float scale = normed ? to_float(static_cast<const S*>(p.scale)[column]) : 1.f;
  const float bias = normed ? to_float(static_cast<const S*>(p.bias)[column]) : 0.f;
  const bool apart = k < p.outliers;
  const uint32_t place = apart ? 0 : k - p.outliers, group = place / p.group_size;
  const uint2 index = apart ? make_uint2(0, 0) : indices_at(p, group, vector, place - group * p.group_size);
  for (uint32_t t = 0; t < p.vector_len; t += kRun) {
    const uint32_t row = vector * p.vector_len + t;
    float q[kRun];
    if (!apart) codeword<S, kRun>(q, p, group, index, t);
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      if (row + i >= p.end) break;
      float weight = apart ? outlier<S>(p, row + i, k) : q[i];
      if (normed) weight = rounded<S>(__fadd_rn(rounded<S>(__fmul_rn(weight, scale)), bias));
      round_to(weight, out[uint64_t(row + i - p.first) * p.in + column]);
    }
  }
}

template <typename S, typename O, int kRun>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    vptq_dequantize_kernel(const __grid_constant__ Arguments p,
                           O* out) {  // [end - first, in]
  release_dependents();
  dependency_wait();
  const uint32_t begin = p.first / p.vector_len, end = (p.end - 1) / p.vector_len + 1;
  for (uint32_t vector = begin + blockIdx.x; vector < end; vector += gridDim.x) {
    for (uint32_t column = threadIdx.x; column < p.in; column += kThreads) {
      const uint32_t place = p.places == nullptr ? column : min(uint32_t(p.places[column]), p.in - 1);
      write_vector<S, O, kRun>(p, vector, place, column, out);
    }
  }
}

template <typename S, typename O, int kRun>
void launch_runs(const Arguments& p, void* out, int device, cudaStream_t stream) {
  const DeviceFacts& facts = device_facts(device, kOp);
  const uint32_t vectors = (p.end - 1) / p.vector_len + 1 - p.first / p.vector_len;
  const uint32_t most = kBlocksPerMultiprocessor * uint32_t(facts.multiprocessors);
  launch(kOp, device, vptq_dequantize_kernel<S, O, kRun>, vectors < most ? vectors : most, kThreads, 0, stream, p,
         static_cast<O*>(out));
}

template <typename S, typename O>
void launch_types(const Arguments& p, void* out, int device, cudaStream_t stream) {
  if (p.vector_len % 8 == 0) return launch_runs<S, O, 8>(p, out, device, stream);
  if (p.vector_len % 4 == 0) return launch_runs<S, O, 4>(p, out, device, stream);
  launch_runs<S, O, 1>(p, out, device, stream);
}

template <typename S>
void launch_stored(const Arguments& p, void* out, Type type, int device, cudaStream_t stream) {
  if (type == Type::kFloat16) return launch_types<S, __half>(p, out, device, stream);
  if (type == Type::kFloat32) return launch_types<S, float>(p, out, device, stream);
  launch_types<S, __nv_bfloat16>(p, out, device, stream);
}

uint32_t bits_of(int64_t count) {
  uint32_t bits = 0;
  while (int64_t(1) << bits < count) ++bits;
  return bits;
}

void check_tables(const Vptq& w) {
  const int64_t most = 1 << 16;
  require(w.vector_len >= 1 && w.vector_len <= 256, kOp, "vector_len", w.vector_len, "must be from 1 to 256");
  require(w.count >= 1 && w.count <= most, kOp, "count", w.count, "must be from 1 to 65536");
  require(w.residuals >= 0 && w.residuals <= most, kOp, "residuals", w.residuals, "must be from 0 to 65536");
  require((w.residuals != 0) == (w.res_centroids != nullptr), kOp, "residuals", w.residuals,
          "must be those of res_centroids");
  require_aligned(w.centroids, 16, kOp, "centroids");
  if (w.residuals != 0) require_aligned(w.res_centroids, 16, kOp, "res_centroids");
  require_aligned(w.indices, w.words != 0 ? 4 : 2, kOp, "indices");
  require((w.scale == nullptr) == (w.bias == nullptr), kOp, "bias", w.bias != nullptr,
          "must be given with scale alone");
  if (w.words == 0) {
    require((w.residuals != 0) == (w.res_indices != nullptr), kOp, "residuals", w.residuals, "must have res_indices");
    return;
  }
  const uint32_t bits = bits_of(w.count) + (w.residuals != 0 ? bits_of(w.residuals) : 0);
  require(bits >= 1 && bits <= 32, kOp, "bits", bits, "of packed indices must be from 1 to 32");
  require(w.words == (w.group_size * bits + 31) / 32, kOp, "words", w.words, "must be those of group_size indices");
}

void check_sizes(const Vptq& w, int64_t row_begin, int64_t row_count) {
  require(w.in >= 1 && w.in <= 1 << 20, kOp, "in", w.in, "must be from 1 to 2^20");
  require(w.out >= 1 && w.out < int64_t(1) << 31, kOp, "out", w.out, "must be from 1 to 2^31 - 1");
  require(w.places == nullptr || w.in <= 1 << 16, kOp, "in", w.in, "must be at most 65536 with a permutation");
  require(w.outliers >= 0 && w.groups >= 1 && w.group_size >= 1 && w.outliers + w.groups * w.group_size == w.in, kOp,
          "in", w.in, "must be outliers + groups * group_size");
  if (w.outliers != 0) {
    require(w.outlier_len >= 1 && w.outlier_len <= 256, kOp, "outlier_len", w.outlier_len, "must be from 1 to 256");
    require(w.outlier_count >= 1 && w.outlier_count <= 1 << 16, kOp, "outlier_count", w.outlier_count,
            "must be from 1 to 65536");
    require_aligned(w.outlier_indices, 2, kOp, "outlier_indices");
    require_aligned(w.outlier_centroids, 2, kOp, "outlier_centroids");
  }
  require(row_begin >= 0 && row_begin < w.out && row_begin % w.vector_len == 0, kOp, "row_begin", row_begin,
          "must be a row of the matrix that begins a vector");
  require(row_count >= 1 && row_count <= w.out - row_begin, kOp, "row_count", row_count, "must be rows that are there");
}

}  // namespace

void vptq_dequantize(const Vptq& w, Type stored, void* out, Type type, int64_t row_begin, int64_t row_count, int device,
                     cudaStream_t stream) {
  check_tables(w);
  check_sizes(w, row_begin, row_count);
  require_aligned(out, type == Type::kFloat32 ? 4 : 2, kOp, "out");
  Arguments p = {};
  p.indices = w.indices, p.res_indices = w.res_indices, p.centroids = w.centroids, p.res_centroids = w.res_centroids;
  p.outlier_indices = w.outlier_indices, p.outlier_centroids = w.outlier_centroids;
  p.places = w.places, p.scale = w.scale, p.bias = w.bias;
  p.in = uint32_t(w.in), p.group_size = uint32_t(w.group_size), p.words = uint32_t(w.words);
  p.vector_len = uint32_t(w.vector_len), p.vectors = uint32_t((w.out - 1) / w.vector_len + 1);
  p.count = uint32_t(w.count), p.residuals = uint32_t(w.residuals), p.outliers = uint32_t(w.outliers);
  p.outlier_len = uint32_t(w.outlier_len), p.outlier_count = uint32_t(w.outlier_count);
  p.main_bits = bits_of(w.count), p.bits = p.main_bits + (w.residuals != 0 ? bits_of(w.residuals) : 0);
  p.first = uint32_t(row_begin), p.end = uint32_t(row_begin + row_count);
  const DeviceGuard guard(device, kOp);
  if (stored == Type::kFloat16) return launch_stored<__half>(p, out, type, device, stream);
  if (stored == Type::kFloat32) return launch_stored<float>(p, out, type, device, stream);
  launch_stored<__nv_bfloat16>(p, out, type, device, stream);
}

}  // namespace localq
