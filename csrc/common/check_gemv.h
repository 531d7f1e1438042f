// Checks of the extras of a product (gemv.h), shared by the launchers of all formats.
#pragma once

#include "common/gemv.h"
#include "common/require.h"

namespace localq {

// `first` and `second`: rows of the first two matrices of `count`; any numbers where there are fewer.
inline void check_extras(const char* op, int count, int64_t first, int64_t second, const GemvExtras& extras, int rows) {
  if (extras.activation != Activation::kNone) {
    require(count == 2, op, "matrices", count, "must be 2 with an activation");
    require(first == second, op, "out", second, "must be that of the first matrix");
    require(extras.residual == nullptr, op, "residual", 1, "must be null with an activation");
  }
  if (extras.norm == NormKind::kNone) return;
  require(rows == 1, op, "rows", rows, "must be 1 with a norm");
  require_aligned(extras.norm_weight, 2, op, "norm_weight");
}

}  // namespace localq
