// Checks that the operations share.
#pragma once

#include "common/require.h"
#include "delta/delta.h"

namespace localq::delta {

constexpr int kMostShared = 8;  // value heads per key head

inline void check_net(const DeltaNet& net, Type type, const char* op) {
  require(type != Type::kFloat32, op, "dtype", int(type), "must be float16 or bfloat16");
  require(net.key_heads >= 1 && net.key_heads <= 1024, op, "key_heads", net.key_heads, "must be from 1 to 1024");
  require(net.shared >= 1 && net.shared <= kMostShared, op, "value heads per key head", net.shared,
          "must be from 1 to 8");
  require_aligned(net.taps, 8, op, "taps");
  require_aligned(net.rates, 4, op, "rates");
  require_aligned(net.offsets, 4, op, "offsets");
}

inline void check_step(const DeltaStep& step, const char* op) {
  require_aligned(step.inputs, 2, op, "inputs");
  require_aligned(step.gates, 2, op, "gates");
  require(step.hidden >= 8 && step.hidden % 8 == 0, op, "hidden", step.hidden, "must be a multiple of 8");
  require(step.x_kind != NormKind::kNone, op, "x_kind", int(step.x_kind), "must be a norm");
  require_aligned(step.x, 16, op, "x");
  require_aligned(step.x_norm, 16, op, "x_norm");
  require_aligned(step.write, 16, op, "write");
  require_aligned(step.decay, 16, op, "decay");
  require_aligned(step.norm, 2, op, "norm");
  require_aligned(step.columns, 2, op, "columns");
  require_aligned(step.matrix, 16, op, "matrix");
  require_aligned(step.heads, 4, op, "heads");
  require_aligned(step.arrived, 4, op, "arrived");
  require_aligned(step.out, 2, op, "out");
}

}  // namespace localq::delta
