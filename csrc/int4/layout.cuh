// Storage of 4-bit affine weights as kernels see it: the tiled order, and the conversion of nibbles to numbers.
//
// The tiled order has the bytes of localq/formats/int4/codec.py in the order in which the kernels read them; it is made
// at load (localq/formats/int4/tiles.py) and can be undone. out is a multiple of 16, in of 64. A tile is 16 rows, a
// block 64 columns of it; lane = 4 g + t of a warp holds rows g and g + 8:
//   codes   word i of lane's four of block b, tile T: u32 at (((T * blocks + b) * 32 + lane) * 4 + i) * 4. With column
//           c = 64 b + 32 (i / 2) + 8 t + 4 (i % 2) it holds, lowest nibble first,
//             row g, c | row g + 8, c | row g, c + 2 | row g + 8, c + 2 | the same of c + 1 and c + 3
//           so that nibbles 0 and 4, and so on, are the halves of a register of m16n8k16's operand A
//   scales  group j, tile T: ((T * groups + j) * 8 + g) * 2 + h is that of row g + 8 h
//   zeros   group j, tile T: byte (T * groups + j) * 8 + g: row g in the low nibble, row g + 8 in the high one
#pragma once

#include <cstdint>
#include <cstring>

#include "common/mma.cuh"
#include "common/shared_memory.cuh"
#include "common/tile_shares.cuh"

namespace localq::int4 {

constexpr int kTile = kTileRows;  // rows of a tile
constexpr int kBlock = 64;        // columns of a block
constexpr int kBlockBytes = 512;  // codes of a block of a tile

// The bits of `from` as another type.
template <typename To, typename From>
__device__ __forceinline__ To as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// 16 bytes of codes if more than `needed` are `left`, else `to` is unchanged. Bypasses L1: codes are read once.
// volatile keeps loads and products in source order; other orders need more registers than there are.
__device__ __forceinline__ void load_codes(uint4& to, const uint8_t* from, int left, int needed) {
#ifdef __CUDA_ARCH__
  asm volatile(
      "{.reg .pred p; setp.gt.s32 p, %5, %6;"
      "@p ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];}"
      : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
      : "l"(from), "r"(left), "r"(needed));
#else
  if (left > needed) to = *reinterpret_cast<const uint4*>(from);
#endif
}

// 16 columns of x, 8 and the 8 that follow 32 columns later, in shared or global memory; predicated in the same way.
__device__ __forceinline__ void load_x(uint32_t (&to)[8], const uint8_t* from, int left, int needed) {
#ifdef __CUDA_ARCH__
  asm volatile(
      "{.reg .pred p; setp.gt.s32 p, %9, %10;"
      "@p ld.v4.u32 {%0, %1, %2, %3}, [%8]; @p ld.v4.u32 {%4, %5, %6, %7}, [%8+64];}"
      : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3]), "+r"(to[4]), "+r"(to[5]), "+r"(to[6]), "+r"(to[7])
      : "l"(from), "r"(left), "r"(needed));
#else
  for (int i = 0; i < 8 && left > needed; ++i) to[i] = reinterpret_cast<const uint32_t*>(from)[i % 4 + i / 4 * 16];
#endif
}

// A nibble q in its place is a number already: q * 2^-24 in f16, q * 2^-133 in bf16, and 16 times that four bits higher
// (in bf16 the highest bit of that nibble is the lowest exponent bit, which has the same weight there). Multiplying by
// kUp, a power of two, and subtracting the zero point times kUp is exact: one FMA for two weights, without setting
// exponent bits. The result is the difference / kBack, 16 times that for rows g + 8.
template <typename T>
struct Nibble;
template <>
struct Nibble<__half> {
  static constexpr uint32_t kUp = 0x74007400u, kDown = 0xf400f400u;  // 2^14, -2^14
  static constexpr float kBack = 1024.f;                             // 2^10: factor from results to differences
  using Pair = __half2;
};
template <>
struct Nibble<__nv_bfloat16> {
  static constexpr uint32_t kUp = 0x7f007f00u, kDown = 0xff00ff00u;  // 2^127, -2^127
  static constexpr float kBack = 64.f;
  using Pair = __nv_bfloat162;
};
constexpr uint32_t kLowNibbles = 0x000f000fu, kHighNibbles = 0x00f000f0u;

// Zero points of rows g and g + 8 (byte k of `word`) as the addends of `decode`.
template <typename T>
__device__ __forceinline__ void spread_zeros(uint32_t (&zeros)[2], uint32_t word, int k) {
  using Pair = typename Nibble<T>::Pair;
  const uint32_t both = __byte_perm(word, 0u, 0x4040u | uint32_t(k) << 8 | uint32_t(k));
  const Pair down = as<Pair>(Nibble<T>::kDown);
  zeros[0] = as<uint32_t>(__hmul2(as<Pair>(both & kLowNibbles), down));
  zeros[1] = as<uint32_t>(__hmul2(as<Pair>(both & kHighNibbles), down));
}

template <typename T>
__device__ __forceinline__ uint32_t less(uint32_t nibbles, uint32_t zeros) {
  using Pair = typename Nibble<T>::Pair;
  return as<uint32_t>(__hfma2(as<Pair>(nibbles), as<Pair>(Nibble<T>::kUp), as<Pair>(zeros)));
}

// A word of codes as the operand A: (code - zero point) / kBack, times 16 for rows g + 8.
template <typename T>
__device__ __forceinline__ void decode(uint32_t (&a)[4], uint32_t word, const uint32_t (&zeros)[2]) {
  a[0] = less<T>(word & kLowNibbles, zeros[0]);
  a[1] = less<T>(word & kHighNibbles, zeros[1]);
  word >>= 8;
  a[2] = less<T>(word & kLowNibbles, zeros[0]);
  a[3] = less<T>(word & kHighNibbles, zeros[1]);
}

}  // namespace localq::int4
