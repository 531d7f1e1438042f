// A launch of gemv.cuh, for its launchers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/gemv.h"
#include "common/types.h"

namespace localq {

constexpr int kMostSlots = 16;

// What a unit of results is, and from which rows of W it comes.
enum class BlockKind : int {
  kDense,   // 16 results of matrices that lie behind each other
  kPair,    // 8 results of activation(first matrix) * second
  kGateUp,  // 8 results of one slot: gate and up of its expert
  kDown,    // 8 results, the weighted sum over all slots
};

// One matrix of a dense launch, or the stack of experts.
struct BlockMatrix {
  const uint8_t* codes;
  const uint8_t* scales;
  const void* bias;  // T [out], of a stack [experts, out]; or null
  uint32_t out;      // rows, of an expert
};

// A launch.
struct BlockGemv {
  BlockMatrix matrix[kMaxSegments];
  GemvExtras extras;  // without its biases
  BlockKind kind;
  uint32_t in, row_bytes;
  uint32_t results;  // per row of x, or per slot
  uint32_t items;    // of a tile
  uint32_t units;    // of the launch; of kGateUp `slot_units` for each slot
  uint32_t slot_units;
  uint32_t parts;     // tiles of a unit
  bool biased;        // any matrix has a bias
  uint32_t x_rows;    // of x that are staged
  uint32_t x_stride;  // bytes from row to row of x in shared memory; 0: x is read where it is
  uint32_t rows;      // of x, of dense launches; else 1
  // experts
  const int32_t* chosen;  // [slots] or null
  const float* weights;   // [slots], of kDown
  uint32_t experts, slots;
  bool early;  // nothing that the launch before wrote is needed to find the weights
  bool interleaved, clamped;
  float alpha, limit;
  // NF4
  const float *code_map, *nested_map, *nested_absmax;
  float offset;
};

// Launches a product with weights in MXFP4: `p` but for items and x_stride.
void launch_mxfp4_blocks(const char* op, const BlockGemv& p, const void* x, void* y, Type type, int device,
                         cudaStream_t stream);

}  // namespace localq
