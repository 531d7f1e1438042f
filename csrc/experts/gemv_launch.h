// Arguments of a launch of gemv.cuh.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/gemv.h"
#include "common/types.h"

namespace localq {

constexpr int kMostSlots = 16;

// What a unit of results is, and which rows of W it needs.
enum class BlockKind : int {
  kDense,   // 16 results of concatenated matrices
  kPair,    // 8 results of activation(first matrix) * second
  kGateUp,  // 8 results of one slot: gate and up of its expert
  kDown,    // 8 results, the weighted sum over all slots
};

// One matrix of a dense launch, or the stack of experts.
struct BlockMatrix {
  const uint8_t* codes;
  const uint8_t* scales;
  const void* bias;  // T [out], or [experts, out] of a stack; or null
  uint32_t out;      // rows, per expert
};

// A launch.
struct BlockGemv {
  BlockMatrix matrix[kMaxSegments];
  GemvExtras extras;  // without its biases
  BlockKind kind;
  uint32_t in, row_bytes;
  uint32_t results;  // per row of x, or per slot
  uint32_t items;    // per tile
  uint32_t units;    // of the launch; for kGateUp `slot_units` per slot
  uint32_t slot_units;
  uint32_t parts;     // tiles per unit
  bool biased;        // any matrix has a bias
  uint32_t x_rows;    // rows of x that are staged
  uint32_t x_stride;  // row stride of x in shared memory, in bytes; 0: x is read from global memory
  uint32_t rows;      // of x in dense launches; else 1
  // experts
  const int32_t* chosen;  // [slots] or null
  const float* weights;   // [slots], for kDown
  uint32_t experts, slots;
  bool early;  // the addresses of the weights do not depend on the preceding launch
  bool interleaved, clamped;
  float alpha, limit;
  // NF4
  const float *code_map, *nested_map, *nested_absmax;
  float offset;
};

// Launches a product with MXFP4 weights: `p` without items and x_stride.
void launch_mxfp4_blocks(const char* op, const BlockGemv& p, const void* x, void* y, Type type, int device,
                         cudaStream_t stream);

}  // namespace localq
