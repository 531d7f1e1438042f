// Storage of scaled weights as kernels see it: the tiled order, and how codes become operands of tensor cores.
//
// The tiled order has the bytes of the tensors in the order in which kernels read them; it is made at load
// (localq/formats/scaled/tiles.py) and can be undone. out is a multiple of 16, in of the columns of a block. A tile is
// 16 rows; a tile block is its part of so many columns. Lane = 4 g + t of a warp holds rows g and g + 8. A word of four
// codes of a row, or of four of both rows, is one operand A of m16n8k16, whose halves are columns c and c + 1:
//   a0 row g, c, c + 1 | a1 row g + 8, c, c + 1 | a2 row g, c + 2, c + 3 | a3 row g + 8, c + 2, c + 3
//
//   bytes      32 columns: [32 lanes][4 words]: columns c = 8 t of row g, of row g + 8, c = 8 t + 4 of row g, of g + 8;
//              in a word the columns c, c + 2, c + 1, c + 3
//   nibbles    64 columns: [32 lanes][4 words]: word i has columns c = 16 t + 4 i of row g in lower and of row g + 8 in
//              upper nibbles; in a word the columns c, c + 2, c + 1, c + 3. So a lane has one group of 16 columns, and
//              one scale of each row
//
// kind        columns  codes      scales of a tile block               zero points
// kNvfp4      64       nibbles    e4m3 [8 g][4 t][rows g, g + 8]
// kFp8Blocks  64       2 bytes    one f32
// kFp8Rows    64       2 bytes
// kInt8Rows   32       bytes
// kInt8ByN    N        N/32 bytes f32 [8 g][rows g, g + 8]             u8 [8 g][rows g, g + 8]
#pragma once

#include "common/small_floats.cuh"
#include "gguf/products.cuh"

namespace localq::scaled {

using gguf::as;
using gguf::both_rows;
using gguf::kMagic;
using gguf::twice;
using gguf::word_at;
using gguf::words_at;
using gguf::X;

// Four codes of e4m3 of a row.
__device__ __forceinline__ void spread_e4m3(uint32_t& near, uint32_t& far, uint32_t word) {
  near = e4m3_halves(word << 8);
  far = e4m3_halves(word);
}

// Four codes of 8 bits less their zero point, whose halves are 1024 + zero: exact.
__device__ __forceinline__ void spread_bytes(uint32_t& near, uint32_t& far, uint32_t word, __half2 zero) {
  near = as<uint32_t>(__hsub2(as<__half2>(__byte_perm(word, kMagic, 0x4240)), zero));
  far = as<uint32_t>(__hsub2(as<__half2>(__byte_perm(word, kMagic, 0x4341)), zero));
}

// Two halves times a power of two, or another number, in f32.
__device__ __forceinline__ float2 scaled_halves(uint32_t pair, float by) {
  const float2 both = both_rows(pair);
  return {both.x * by, both.y * by};
}

}  // namespace localq::scaled
