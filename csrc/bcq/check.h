// What the launchers of binary codes check of a matrix.
#pragma once

#include "bcq/gemv.h"
#include "common/check.h"

namespace localq::bcq {

// Throws std::invalid_argument by the argument's name.
inline void check_matrix(const char* op, const BcqMatrix& w) {
  require(w.out >= 1 && w.out < int64_t(1) << 31, op, "out", w.out, "must be positive and not larger");
  require(w.in >= 8 && w.in % 8 == 0 && w.in <= 1 << 24, op, "in", w.in, "must be a multiple of 8, at most 2^24");
  require(w.planes >= 1 && w.planes <= kMaxPlanes, op, "planes", w.planes, "must be from 1 to 5");
  const bool power = w.group >= 32 && w.group < w.in && (w.group & (w.group - 1)) == 0;
  require(power || w.group == w.in, op, "group", w.group, "must be in, or a power of two from 32 on");
  require_aligned(w.codes, 16, op, "codes");
  require_aligned(w.scales, 16, op, "scales");
}

// log2 of a group's eights of columns; 31 where all columns are one.
inline uint32_t group_shift(const BcqMatrix& w) {
  uint32_t shift = 0;
  while (int64_t(8) << shift < w.group) ++shift;
  return w.group == w.in ? 31 : shift;
}

// Groups of a row.
inline uint32_t groups(const BcqMatrix& w) {
  return uint32_t((w.in + w.group - 1) / w.group);
}

}  // namespace localq::bcq
