// The 16 values of a row as bytes that PRMT looks up and tensor cores multiply.
//
// A row's values are v = s (252 H + L) in 16 bits of fixed point: s = largest / 31500, H and L signed bytes, so v is
// off by at most largest / 63000. (f16 has 1/4096 of a value near the largest; sums of products are exact here.) Bytes
// of 8 entries are two registers, and a PRMT by the codes themselves takes four entries; bit 3 of a code asks PRMT for
// the sign of entry k, k = code % 8, where the value is entry k + 8, and the other way round with that bit turned. So
// both are looked up, and both are added up by the tensor cores: what was not meant adds 0, or -1 where its sign is
// set. That -1 is in the tables already: T'[k] = T[k] + [T'[k + 8] < 0], and T'[k + 8] likewise.
#pragma once

#include "row_gemv.cuh"

namespace localq::rowlut {

constexpr int kBase = 252;  // so that |L| <= 126, and one more is a byte still
constexpr float kLargestEntry = 31500.f;
constexpr uint32_t kOnes = 0x01010101u, kSigns = 0x80808080u, kRest = 0x7f7f7f7fu;

// Tables of a block: entries 0 to 15 of H, then of L; and s. In shared memory.
struct Tables {
  uint4* bytes;   // [rows][2]
  float* scales;  // [rows]
};

// Entries that follow each other.
struct alignas(8) Four {
  __half value[4];
};

constexpr uint32_t kTableBytesOfRow = 2 * sizeof(uint4) + sizeof(float);

// a + b, byte by byte; b of zeros and ones.
__device__ __forceinline__ uint32_t add_bytes(uint32_t a, uint32_t b) {
  return ((a & kRest) + b) ^ (a & kSigns);
}
// 1 in every byte that is negative.
__device__ __forceinline__ uint32_t negative(uint32_t bytes) {
  return bytes >> 7 & kOnes;
}

// Entries k .. k + 3 and k + 8 .. k + 11, one of H and L: what each adds where the other is meant goes into the other.
// The sign of the first decides that of the second, but where the first is -1 and the second negative.
__device__ __forceinline__ void balance(uint32_t& first, uint32_t& second) {
  const uint32_t others = ~first, lone = ~(((others & kRest) + kRest) | others) >> 7 & kOnes;  // 1 where first is -1
  second = add_bytes(second, negative(first) & ~(lone & negative(second)));
  first = add_bytes(first, negative(second));
}

// The four values of `from` over s, as bytes of H and L.
__device__ __forceinline__ void digits(uint32_t& high, uint32_t& low, const __half (&from)[4], float inverse) {
  constexpr float kMagic = 12582912.f;  // 1.5 * 2^23: what is added to it is rounded to whole numbers
  uint32_t h[4], l[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float value = to_float(from[i]) * inverse, rounded = fmaf(value, 1.f / kBase, kMagic);
    h[i] = __float_as_uint(rounded);
    l[i] = __float_as_uint(fmaf(rounded - kMagic, float(-kBase), value) + kMagic);
  }
  high = __byte_perm(__byte_perm(h[0], h[1], 0x0040), __byte_perm(h[2], h[3], 0x0040), 0x5410);
  low = __byte_perm(__byte_perm(l[0], l[1], 0x0040), __byte_perm(l[2], l[3], 0x0040), 0x5410);
}

// Entries 4 half .. 4 half + 3 of a row, and those 8 behind them.
struct HalfRow {
  Four entries[2];
};

__device__ __forceinline__ HalfRow load_half(const __half* values, uint32_t o, uint32_t half) {
  const auto* row = reinterpret_cast<const Four*>(values + uint64_t(o) * 16) + half;
  return {{row[0], row[2]}};
}

// Row `at` of the tables. Two neighbouring lanes share it, `half` tells which; all lanes of a warp call.
__device__ __forceinline__ void fill_row(const Tables& tables, uint32_t at, const HalfRow& row, uint32_t half,
                                         bool there) {
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(to_float(row.entries[i / 4].value[i % 4])));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
  const float inverse = largest > 0.f ? kLargestEntry / largest : 0.f;
  uint32_t high[2], low[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) digits(high[i], low[i], row.entries[i].value, inverse);
  balance(high[0], high[1]);
  balance(low[0], low[1]);
  if (!there) return;
  auto* words = reinterpret_cast<uint32_t*>(tables.bytes + 2 * at) + half;
  words[0] = high[0], words[2] = high[1], words[4] = low[0], words[6] = low[1];
  if (half == 0) tables.scales[at] = largest * (1.f / kLargestEntry);
}

}  // namespace localq::rowlut
