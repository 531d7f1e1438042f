// csrc/search/adjoint_kernel.cuh on the CPU, as a library for tests/formats/codebooks/test_adjoint_kernel.py.
#include <vector>

#define __device__
#define __forceinline__ inline
// after the above, which says what the words of CUDA mean
#include "search/adjoint_kernel.cuh"

// A launch: every share, and of it the lanes one after the other, since none looks at another's column.
extern "C" void adjoint_on_cpu(const localq::Adjoint* given, uint32_t shares) {
  const localq::Adjoint& p = *given;
  for (uint32_t share = 0; share < shares; ++share) {
    std::vector<float> table(localq::kAdjointEntries * localq::kAdjointLanes, 0.f);
    const uint32_t begin = uint64_t(p.rows) * share / shares, end = uint64_t(p.rows) * (share + 1) / shares;
    for (uint32_t lane = 0; lane < localq::kAdjointLanes; ++lane) {
      for (uint32_t row = begin; row < end; ++row) localq::add_row(p, row, lane, table.data() + lane);
    }
    float* const sums = p.sums + uint64_t(share) * localq::kAdjointEntries * p.length;
    for (uint32_t i = 0; i < localq::kAdjointEntries * p.length; ++i) sums[i] = sum_of_lanes(p, table.data(), i);
  }
}
