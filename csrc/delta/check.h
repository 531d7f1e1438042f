// Checks that a decode step and a pass of many tokens share.
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

}  // namespace localq::delta
