// What checks throw.
#include "common/check.h"

#include <stdexcept>
#include <string>

namespace localq {

void refuse(const char* op, const char* argument, int64_t value, const char* rule) {
  throw std::invalid_argument(std::string(op) + ": " + argument + " = " + std::to_string(value) + ", " + rule);
}

void fail(const char* op, cudaError_t status) {
  throw std::runtime_error(std::string(op) + ": CUDA error: " + cudaGetErrorString(status));
}

}  // namespace localq
