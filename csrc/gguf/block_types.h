// From the number of a block type to its struct, for launchers.
#pragma once

#include "common/launch.h"
#include "common/require.h"
#include "gguf/gguf.h"
#include "gguf/grid_blocks.cuh"
#include "gguf/iq4_blocks.cuh"
#include "gguf/k_blocks.cuh"
#include "gguf/nvfp4_blocks.cuh"
#include "gguf/ternary_blocks.cuh"

namespace localq::gguf {

// `Block` may need a table beside x; `Narrow` needs none, or is the same.
template <class Block_, class Narrow_ = Block_>
struct Of {
  using Block = Block_;
  using Narrow = Narrow_;
};

// get(Of<...>{}) of a block type with kernels; throws for the others.
template <class Get>
auto of_type(GgufType of, const char* op, Get get) {
  switch (of) {
    case GgufType::kQ4_0:
      return get(Of<Q4_0>{});
    case GgufType::kQ4_1:
      return get(Of<Q4_1>{});
    case GgufType::kQ5_0:
      return get(Of<Q5_0>{});
    case GgufType::kQ5_1:
      return get(Of<Q5_1>{});
    case GgufType::kQ8_0:
      return get(Of<Q8_0>{});
    case GgufType::kQ2_K:
      return get(Of<Q2_K>{});
    case GgufType::kQ3_K:
      return get(Of<Q3_K>{});
    case GgufType::kQ4_K:
      return get(Of<Q4_K>{});
    case GgufType::kQ5_K:
      return get(Of<Q5_K>{});
    case GgufType::kQ6_K:
      return get(Of<Q6_K>{});
    case GgufType::kIQ2_XXS:
      return get(Of<IQ2_XXS>{});
    case GgufType::kIQ2_XS:
      return get(Of<IQ2_XS>{});
    case GgufType::kIQ2_S:
      return get(Of<IQ2_S>{});
    case GgufType::kIQ3_XXS:
      return get(Of<IQ3_XXS>{});
    case GgufType::kIQ3_S:
      return get(Of<IQ3_S>{});
    case GgufType::kIQ4_NL:
      return get(Of<IQ4_NL, IQ4_NLWithoutTable>{});
    case GgufType::kIQ4_XS:
      return get(Of<IQ4_XS, IQ4_XSWithoutTable>{});
    case GgufType::kIQ1_S:
      return get(Of<IQ1_S>{});
    case GgufType::kIQ1_M:
      return get(Of<IQ1_M>{});
    case GgufType::kTQ1_0:
      return get(Of<TQ1_0>{});
    case GgufType::kTQ2_0:
      return get(Of<TQ2_0>{});
    case GgufType::kNVFP4:
      return get(Of<NVFP4>{});
  }
  require(false, op, "type", static_cast<int>(of), "has no kernel");
  return get(Of<Q4_0>{});
}

}  // namespace localq::gguf
