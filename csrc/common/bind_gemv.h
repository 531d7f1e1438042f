// The extras of a matrix-vector product (gemv.h) from Python's arguments.
#pragma once

#include <stdexcept>
#include <vector>

#include "common/bind.h"
#include "common/gemv.h"

namespace localq {

inline GemvExtras gemv_extras(int norm, uintptr_t norm_weight, float eps, uintptr_t residual, int activation,
                              const std::vector<uintptr_t>& biases, bool y_is_f32) {
  if (biases.size() > kMaxSegments) throw std::invalid_argument("biases: more than 3");
  GemvExtras extras = {};
  extras.norm = static_cast<NormKind>(norm);
  extras.norm_weight = pointer<const void>(norm_weight);
  extras.eps = eps;
  extras.residual = pointer<const void>(residual);
  extras.activation = static_cast<Activation>(activation);
  for (size_t i = 0; i < biases.size(); ++i) extras.bias[i] = pointer<const void>(biases[i]);
  extras.y_is_f32 = y_is_f32;
  return extras;
}

}  // namespace localq
