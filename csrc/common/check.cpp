// The exception of a CUDA error.
#include "common/check.h"

#include <stdexcept>
#include <string>

namespace localq {

void fail(const char* op, cudaError_t status) {
  throw std::runtime_error(std::string(op) + ": CUDA error: " + cudaGetErrorString(status));
}

}  // namespace localq
