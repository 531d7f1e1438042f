// The exception of a refused argument.
#include "common/require.h"

#include <stdexcept>
#include <string>

namespace localq {

void refuse(const char* op, const char* argument, int64_t value, const char* rule) {
  throw std::invalid_argument(std::string(op) + ": " + argument + " = " + std::to_string(value) + ", " + rule);
}

}  // namespace localq
