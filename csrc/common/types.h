// The types of values that launchers take, as numbers of the Python side (localq/kernels/checks.py, TYPES).
#pragma once

namespace localq {

enum class Type : int { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2 };

}  // namespace localq
