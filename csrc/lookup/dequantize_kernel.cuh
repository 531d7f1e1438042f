// vq_dequantize: the kernel (dequantize.cu says what it does). The first book's terms are put, the second's added.
#pragma once

#include "common/rounding.cuh"
#include "lookup/intrinsics.cuh"

namespace localq::tiled {

constexpr uint32_t kTile = 16, kRun = 8;          // rows of a tile; weights of a lane
constexpr uint32_t kEntries = 256, kEntry = 256;  // of a page; bytes of one: two parts of 16 bytes, 8 copies of each
constexpr uint32_t kPart = 128, kCopies = 8;      // bytes of a part and its copies
constexpr uint32_t kPage = kEntries * kEntry;     // bytes
constexpr uint32_t kZeros = 512;                  // bytes behind a page: what positions before the row's first have
constexpr uint32_t kAbsent = 65536, kHalfPage = kPage / 2;

struct Source {
  const uint8_t* codes;
  const uint32_t* codebook;
  uint32_t before, tile_bytes, entries;
};

struct Arguments {
  Source book[2];
  const void* scales;  // from the first row on
  uint32_t rows, in, runs, chunks, items;
  uint32_t first_tile;
};

__device__ __forceinline__ uint32_t without_minus_zero(uint32_t word) {
  const uint32_t low = (word & 0xffffu) == 0x8000u ? 0u : word & 0xffffu;
  return (word >> 16) == 0x8000u ? low : (word & 0xffff0000u) | low;
}

// 8 weights of every codeword of `words` words, from word `start` on, to entries of `step` bytes; all threads.
__device__ __forceinline__ void stage_part(const Source& s, uint32_t words, uint32_t start, uint8_t* to,
                                           uint32_t step) {
  for (uint32_t i = threadIdx.x; i < kEntries * kCopies; i += blockDim.x) {
    const uint32_t entry = i / kCopies, copy = i % kCopies;
    const uint32_t* const from = s.codebook + (entry & (s.entries - 1)) * words + start;
    store_words(to + entry * step + 16 * copy,
                make_uint4(without_minus_zero(__ldg(from)), without_minus_zero(__ldg(from + 1)),
                           without_minus_zero(__ldg(from + 2)), without_minus_zero(__ldg(from + 3))));
  }
}
__device__ __forceinline__ void stage_zeros(uint8_t* to) {
  if (threadIdx.x < kZeros / 16) store_words(to + 16 * threadIdx.x, make_uint4(0, 0, 0, 0));
}

// The codes of 16 rows at a position; none before the first.
__device__ __forceinline__ uint4 codes_at(const Source& s, uint32_t tile, uint32_t position, uint32_t lag) {
  if (position < lag) return make_uint4(0, 0, 0, 0);
  return __ldg(reinterpret_cast<const uint4*>(s.codes + uint64_t(tile) * s.tile_bytes) + s.before + position - lag);
}
// What makes an address of a code: the lane's copy, and where zeros are for a position that is not there.
__device__ __forceinline__ uint32_t lane_bytes(uint32_t copy_step, bool absent) {
  return threadIdx.x % kCopies * copy_step | (absent ? kAbsent : 0u);
}
// Row k's code of `codes` as bytes into a page.
__device__ __forceinline__ uint32_t address(const uint4& codes, uint32_t lane, int k) {
  const uint32_t word[4] = {codes.x, codes.y, codes.z, codes.w};
  return __byte_perm(word[k / 4], lane, 0x7604u | (uint32_t(k % 4) << 4));
}

__device__ __forceinline__ float2 unpacked(uint32_t word, __half) {
  const uint16_t low = uint16_t(word), high = uint16_t(word >> 16);
  return make_float2(to_float(reinterpret_cast<const __half&>(low)), to_float(reinterpret_cast<const __half&>(high)));
}
__device__ __forceinline__ float2 unpacked(uint32_t word, __nv_bfloat16) {
  return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}

// Four weights of two words: put, or added, to sum[kFrom ..].
template <typename C, bool kPut, int kFrom>
__device__ __forceinline__ void four(float (&sum)[kRun], uint32_t first, uint32_t second) {
  const float2 low = unpacked(first, C{}), high = unpacked(second, C{});
  const float terms[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[kFrom + i] = kPut ? terms[i] : sum[kFrom + i] + terms[i];
}

template <int kStride, int kLength>
struct Book;

// A lane's 8 weights are positions p = 2 run and p + 1. Quarters of a codeword that lie behind each other are a part:
// 0 and 1, 2 and 3 in a page, 1 and 2 in half of one behind it.
template <>
struct Book<4, 16> {
  static constexpr int kStride = 4, kLength = 16;
  static constexpr uint32_t kLastQuarter = kPart + 8;  // bytes into an entry
  static constexpr uint32_t kMiddle = kPage + kZeros, kBytes = kMiddle + kHalfPage + kZeros;
  struct Codes {
    uint4 of[5];  // of positions p - 3 .. p + 1; the first and the last exchanged in half of the lanes
    uint32_t lane[5];
    bool exchanged;
  };
  static __device__ __forceinline__ void stage(const Source& s, uint8_t* to) {
    stage_part(s, 8, 0, to, kEntry);
    stage_part(s, 8, 4, to + kPart, kEntry);
    stage_part(s, 8, 2, to + kMiddle, kEntry / 2);
    stage_zeros(to + kPage);
    stage_zeros(to + kMiddle + kHalfPage);
  }
  static __device__ __forceinline__ Codes load(const Source& s, uint32_t tile, uint32_t run) {
    Codes codes;
#pragma unroll
    for (uint32_t i = 0; i < 5; ++i) codes.of[i] = codes_at(s, tile, 2 * run + 1, 4 - i);
    codes.lane[0] = lane_bytes(16, run < 2) + kLastQuarter, codes.lane[1] = lane_bytes(16, run < 1);
    codes.lane[2] = lane_bytes(32, run < 1), codes.lane[3] = codes.lane[4] = lane_bytes(16, false);
    codes.exchanged = threadIdx.x / kCopies % 2;
    if (codes.exchanged) {
      const uint4 of = codes.of[0];
      const uint32_t lane = codes.lane[0];
      codes.of[0] = codes.of[4], codes.of[4] = of;
      codes.lane[0] = codes.lane[4], codes.lane[4] = lane;
    }
    return codes;
  }
  // Of the first and the last code a quarter is needed. Lanes 8 to 15 (and 24 to 31) ask for the other one than lanes
  // 0 to 7, which lies in the other half of a copy: so 16 lanes meet in no bank.
  template <typename C, bool kPut>
  static __device__ __forceinline__ void add(float (&sum)[kRun], const Codes& codes, uint32_t table, int k) {
    uint32_t one[2], other[2], word[4];
    load_words<0>(one, table + address(codes.of[0], codes.lane[0], k));
    load_words<0>(other, table + address(codes.of[4], codes.lane[4], k));
    four<C, kPut, 0>(sum, codes.exchanged ? other[0] : one[0], codes.exchanged ? other[1] : one[1]);
    load_words<kPart>(word, table + address(codes.of[1], codes.lane[1], k));
    four<C, false, 0>(sum, word[0], word[1]), four<C, kPut, 4>(sum, word[2], word[3]);
    load_words<kMiddle>(word, table + address(codes.of[2], codes.lane[2], k) / 2);
    four<C, false, 0>(sum, word[0], word[1]), four<C, false, 4>(sum, word[2], word[3]);
    load_words<0>(word, table + address(codes.of[3], codes.lane[3], k));
    four<C, false, 0>(sum, word[0], word[1]), four<C, false, 4>(sum, word[2], word[3]);
    four<C, false, 4>(sum, codes.exchanged ? one[0] : other[0], codes.exchanged ? one[1] : other[1]);
  }
};

// A lane's 8 weights are a position: part `lag` of the codeword of so many positions before.
template <int kLongest>
struct Book<8, kLongest> {
  static constexpr int kStride = 8, kLength = kLongest, kLags = kLength / 8;
  static constexpr uint32_t kBytes = kPage + (kLags > 1 ? kZeros : 0);
  struct Codes {
    uint4 of[kLags];
    uint32_t lane[kLags];
  };
  static __device__ __forceinline__ void stage(const Source& s, uint8_t* to) {
#pragma unroll
    for (uint32_t lag = 0; lag < kLags; ++lag) stage_part(s, kLength / 2, 4 * lag, to + kPart * lag, kEntry);
    if (kLags > 1) stage_zeros(to + kPage);
  }
  static __device__ __forceinline__ Codes load(const Source& s, uint32_t tile, uint32_t run) {
    Codes codes;
#pragma unroll
    for (uint32_t lag = 0; lag < kLags; ++lag) {
      codes.of[lag] = codes_at(s, tile, run, lag), codes.lane[lag] = lane_bytes(16, run < lag);
    }
    return codes;
  }
  template <typename C, bool kPut>
  static __device__ __forceinline__ void add(float (&sum)[kRun], const Codes& codes, uint32_t table, int k) {
    uint32_t word[4];
    if constexpr (kLags == 2) {
      load_words<kPart>(word, table + address(codes.of[1], codes.lane[1], k));
      four<C, kPut, 0>(sum, word[0], word[1]), four<C, kPut, 4>(sum, word[2], word[3]);
    }
    load_words<0>(word, table + address(codes.of[0], codes.lane[0], k));
    constexpr bool kFirst = kPut && kLags == 1;
    four<C, kFirst, 0>(sum, word[0], word[1]), four<C, kFirst, 4>(sum, word[2], word[3]);
  }
};

// A lane's 8 weights are half of a position.
template <>
struct Book<16, 16> {
  static constexpr int kStride = 16, kLength = 16;
  static constexpr uint32_t kBytes = kPage;
  struct Codes {
    uint4 of;
    uint32_t lane;
  };
  static __device__ __forceinline__ void stage(const Source& s, uint8_t* to) {
    stage_part(s, 8, 0, to, kEntry);
    stage_part(s, 8, 4, to + kPart, kEntry);
  }
  static __device__ __forceinline__ Codes load(const Source& s, uint32_t tile, uint32_t run) {
    return {codes_at(s, tile, run / 2, 0), lane_bytes(16, false) + run % 2 * kPart};
  }
  template <typename C, bool kPut>
  static __device__ __forceinline__ void add(float (&sum)[kRun], const Codes& codes, uint32_t table, int k) {
    uint32_t word[4];
    load_words<0>(word, table + address(codes.of, codes.lane, k));
    four<C, kPut, 0>(sum, word[0], word[1]), four<C, kPut, 4>(sum, word[2], word[3]);
  }
};

// In place of a second book.
struct None {
  static constexpr int kStride = 0, kLength = 0;
  static constexpr uint32_t kBytes = 0;
  struct Codes {};
  static __device__ __forceinline__ void stage(const Source&, uint8_t*) {
  }
  static __device__ __forceinline__ Codes load(const Source&, uint32_t, uint32_t) {
    return {};
  }
  template <typename C, bool kPut>
  static __device__ __forceinline__ void add(float (&)[kRun], const Codes&, uint32_t, int) {
  }
};

// Bytes of shared memory before the second book, and in all: two books of one part share a page.
template <typename First, typename Second>
__host__ __device__ constexpr uint32_t second_at() {
  return First::kLength == 8 && Second::kLength == 8 ? kPart : First::kBytes;
}
template <typename First, typename Second>
__host__ __device__ constexpr uint32_t shared_bytes() {
  return second_at<First, Second>() == kPart ? kPage : First::kBytes + Second::kBytes;
}

// Threads of a block, one per multiprocessor: as many as their registers let be, on all architectures.
template <typename First, typename Second>
__host__ __device__ constexpr int threads() {
  return Second::kLength > 8 ? 640 : First::kLength > 8 ? 896 : 1024;
}

__device__ __forceinline__ uint32_t both(float low, float high, __half) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ uint32_t both(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Two weights of a row; of AQLM sum and product are rounded to the type of the codebooks, which is that of the result.
template <typename T, bool kRounded>
__device__ __forceinline__ uint32_t weights_of(float low, float high, float scale) {
  if (!kRounded) return both(low * scale, high * scale, T{});
  const float2 sums = unpacked(both(low, high, T{}), T{});
  return both(sums.x * scale, sums.y * scale, T{});
}

// 16 bytes in one store: left to itself the compiler splits most of them into four.
__device__ __forceinline__ void store_weights(void* to, const uint32_t (&pairs)[kRun / 2]) {
#ifdef __CUDA_ARCH__
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]),
               "r"(pairs[3]));
#else
  *static_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
#endif
}

template <typename First, typename Second, typename C, typename O, bool kRounded>
__global__ void __launch_bounds__(threads<First, Second>(), 1) vq_dequantize_kernel(const __grid_constant__ Arguments p,
                                                                                    O* out) {  // [rows, in]
  constexpr uint32_t kWarps = threads<First, Second>() / 32;
  uint8_t* const memory = shared_memory();
  First::stage(p.book[0], memory);
  Second::stage(p.book[1], memory + second_at<First, Second>());
  release_dependents();
  dependency_wait();
  __syncthreads();
  const uint32_t first_table = shared_address(memory), second_table = first_table + second_at<First, Second>();
  for (uint32_t item = blockIdx.x * kWarps + threadIdx.x / 32; item < p.items; item += gridDim.x * kWarps) {
    const uint32_t tile = item / p.chunks, own = (item - tile * p.chunks) * 32 + threadIdx.x % 32;
    const uint32_t run = min(own, p.runs - 1);  // lanes behind the row's end do as its last
    const auto first = First::load(p.book[0], p.first_tile + tile, run);
    const auto second = Second::load(p.book[1], p.first_tile + tile, run);
    const uint32_t rows = own == run ? p.rows - tile * kTile : 0;
    const C* const scales = static_cast<const C*>(p.scales) + tile * kTile;
    O* to = out + uint64_t(tile) * kTile * p.in + run * kRun;
#pragma unroll
    for (uint32_t k = 0; k < kTile; ++k) {
      float sum[kRun];
      First::template add<C, true>(sum, first, first_table, k);
      Second::template add<C, false>(sum, second, second_table, k);
      const float scale = k < rows ? to_float(__ldg(scales + k)) : 0.f;
      uint32_t pairs[kRun / 2];
#pragma unroll
      for (uint32_t i = 0; i < kRun / 2; ++i) {
        pairs[i] = weights_of<O, kRounded>(sum[2 * i], sum[2 * i + 1], scale);
      }
      if (k < rows) store_weights(to, pairs);
      to += p.in;
    }
  }
}

}  // namespace localq::tiled
