// Decode attention (decode.cu): one warp over its tiles of 16 slots.
#pragma once

#include <type_traits>

#include "attention/decode.cuh"
#include "attention/kv_codes.cuh"

namespace localq::decoding {

// ---- loads of the cache

template <int kBits>
using Chunk = std::conditional_t<kBits == 16, uint4, std::conditional_t<kBits == 8, uint2, unsigned>>;  // 8 elements

template <typename C>
__device__ __forceinline__ C load_chunk(const uint8_t* row, int first, int head_dim) {
  C chunk = {};
  if (first < head_dim) chunk = __ldcg(reinterpret_cast<const C*>(row) + first / 8);
  return chunk;
}

__device__ __forceinline__ Pairs pairs_of(uint4 chunk) {
  return {chunk.x, chunk.y, chunk.z, chunk.w};
}
__device__ __forceinline__ Pairs pairs_of(uint2 chunk) {
  return decode_pairs(chunk);
}
__device__ __forceinline__ Pairs pairs_of(unsigned chunk) {
  return decode_pairs(chunk);
}

// Scales of a vector, in as few loads as their alignment allows.
template <int kCount>
struct alignas(2 * kCount) Scales {
  uint16_t value[kCount];
};
template <int kCount>
__device__ __forceinline__ void load_scales(Scales<kCount>& to, const __half* from) {
  if constexpr (kCount == 8) {
    *reinterpret_cast<uint4*>(to.value) = __ldcg(reinterpret_cast<const uint4*>(from));
  } else if constexpr (kCount == 4) {
    *reinterpret_cast<uint2*>(to.value) = __ldcg(reinterpret_cast<const uint2*>(from));
  } else if constexpr (kCount == 2) {
    *reinterpret_cast<unsigned*>(to.value) = __ldcg(reinterpret_cast<const unsigned*>(from));
  } else {
    to.value[0] = __ldcg(reinterpret_cast<const unsigned short*>(from));
  }
}

// ---- tensor cores

template <typename T>
__device__ __forceinline__ unsigned packed(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
  }
}
__device__ __forceinline__ unsigned scaled(unsigned pair, unsigned scales) {
  const __half2 product = __hmul2(*reinterpret_cast<const __half2*>(&pair), *reinterpret_cast<const __half2*>(&scales));
  return *reinterpret_cast<const unsigned*>(&product);
}

// ---- one warp over its tiles

template <typename T, int kKeyBits, int kValueBits, int kDim, int kHeadTiles>
struct Warp {
  static constexpr int kBlocks = kDim / 32, kWide = kDim / 64, kTiles = kHeadTiles;
  static constexpr bool kCodes = kKeyBits != 16;                // keys and values are quantized
  static constexpr int kPart = kInParts<kDim> ? 4 : kBlocks;    // blocks of k that are held at once
  static constexpr int kWidePart = kInParts<kDim> ? 1 : kWide;  // runs of 64 columns of v, the same
  Chunk<kKeyBits> k[2][kPart];                                  // slots g and 8 + g, columns 32 block + 8 t ..
  Chunk<kValueBits> v[4][kWidePart];        // slots 2t, 2t + 1, 8 + 2t, 9 + 2t, columns 64 wide + 8 g ..
  Scales<kCodes ? kBlocks : 1> k_scale[4];  // of the four slots of v
  Scales<kCodes ? kWide : 1> v_scale[4];    // of the blocks of this lane's columns
  float o[kHeadTiles][kDim / 16][4];
  float largest[kHeadTiles], sum[kHeadTiles];  // of head 8 tile + g; the sum is this lane's part

  __device__ __forceinline__ static int slot_of(int i, int t) {
    return 8 * (i / 2) + 2 * t + i % 2;
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
      largest[h] = kNegInf, sum[h] = 0.f;
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) o[h][i][0] = o[h][i][1] = o[h][i][2] = o[h][i][3] = 0.f;
    }
  }

  // first: the first block of those that are held.
  __device__ __forceinline__ void load_k(const KvLayer& layer, int64_t base, int tile, int count, int lane,
                                         int first = 0) {
    const int g = lane / 4, t = lane % 4, bytes = layer.head_dim * kKeyBits / 8;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int64_t slot = base + min(tile * kTile + 8 * j + g, count - 1);  // never past the live slots
      const uint8_t* row = static_cast<const uint8_t*>(layer.k) + slot * bytes;
#pragma unroll
      for (int b = 0; b < kPart; ++b) {
        k[j][b] = load_chunk<Chunk<kKeyBits>>(row, 32 * (first + b) + 8 * t, layer.head_dim);
      }
    }
    if constexpr (kCodes) load_four(k_scale, layer.k_scales, 0, base, tile, count, t);
  }

  // first: the first run of 64 columns of those that are held.
  __device__ __forceinline__ void load_v(const KvLayer& layer, int64_t base, int tile, int count, int lane,
                                         int first = 0) {
    const int g = lane / 4, t = lane % 4, bytes = layer.head_dim * kValueBits / 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t slot = base + min(tile * kTile + slot_of(i, t), count - 1);
      const uint8_t* row = static_cast<const uint8_t*>(layer.v) + slot * bytes;
#pragma unroll
      for (int w = 0; w < kWidePart; ++w) {
        v[i][w] = load_chunk<Chunk<kValueBits>>(row, 64 * (first + w) + 8 * g, layer.head_dim);
      }
    }
    if constexpr (kCodes) load_four(v_scale, layer.v_scales, g / 4 * kWide, base, tile, count, t);
  }

  template <typename S>
  __device__ __forceinline__ static void load_four(S (&to)[4], const void* scales, int place, int64_t base, int tile,
                                                   int count, int t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t slot = base + min(tile * kTile + slot_of(i, t), count - 1);
      load_scales(to[i], static_cast<const __half*>(scales) + slot * kBlocks + place);
    }
  }

  // s[j] += products of heads g, 8 + g with slots 8 j + 2t, 8 j + 2t + 1 of the tile, in the blocks that are held.
  __device__ __forceinline__ void products(float (&s)[2][4], const Shared<kDim, kHeadTiles>& shared, int lane,
                                           int first_block = 0) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int b = 0; b < kPart; ++b) {
      const int column = 32 * (first_block + b) + 8 * t;
      const uint4 low = *reinterpret_cast<const uint4*>(&shared.q[g][column]);
      uint4 high = {};
      if constexpr (kHeadTiles == 2) high = *reinterpret_cast<const uint4*>(&shared.q[8 + g][column]);
      const unsigned first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const Pairs pairs = pairs_of(k[j][b]);
        if constexpr (!kCodes) {
          multiply<T>(s[j], first, pairs.pair[0], pairs.pair[1]);
          multiply<T>(s[j], second, pairs.pair[2], pairs.pair[3]);
        } else {
          float part[4] = {};
          multiply<T>(part, first, pairs.pair[0], pairs.pair[1]);
          multiply<T>(part, second, pairs.pair[2], pairs.pair[3]);
#pragma unroll
          for (int c = 0; c < 2 * kHeadTiles; ++c) {
            const uint16_t scale = k_scale[2 * j + c % 2].value[scale_place(b, kBlocks)];
            s[j][c] = fmaf(part[c], __half2float(__ushort_as_half(scale)), s[j][c]);
          }
        }
      }
    }
  }

  // Scores -> weights p of slots 2t, 2t + 1, 8 + 2t, 9 + 2t in pairs; updates largest, sum and o.
  __device__ __forceinline__ void soften(unsigned (&p)[kHeadTiles][2], const float (&s)[2][4],
                                         const AttentionStep& step, int tile, int count, int lane) {
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
      float x[4], highest = kNegInf;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool live = tile * kTile + slot_of(i, lane % 4) < count;
        x[i] = live ? score(s[i / 2][2 * h + i % 2], step) : kNegInf;
        highest = fmaxf(highest, x[i]);
      }
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
      if (__any_sync(~0u, highest > largest[h])) {
        const float higher = fmaxf(highest, largest[h]);
        rescale(h, exp2f(largest[h] - higher), lane);
        largest[h] = higher;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = exp2f(x[i] - largest[h] + kLift);
        sum[h] += x[i];
      }
      p[h][0] = packed<T>(x[0], x[1]);
      p[h][1] = packed<T>(x[2], x[3]);
    }
  }

  // `factor` is that of head g; o holds heads 2t and 2t + 1.
  __device__ __forceinline__ void rescale(int h, float factor, int lane) {
    const float even = __shfl_sync(~0u, factor, 8 * (lane % 4)), odd = __shfl_sync(~0u, factor, 8 * (lane % 4) + 4);
    sum[h] *= factor;
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      o[h][i][0] *= even, o[h][i][1] *= odd, o[h][i][2] *= even, o[h][i][3] *= odd;
    }
  }

  // The whole tile in parts, which are loaded where they are used: heads too wide to be held.
  __device__ __forceinline__ void products_in_parts(float (&s)[2][4], const Shared<kDim, kHeadTiles>& shared,
                                                    const KvLayer& layer, int64_t base, int tile, int count, int lane) {
#pragma unroll 1
    for (int first = 0; first < kBlocks; first += kPart) {
      load_k(layer, base, tile, count, lane, first);
      products(s, shared, lane, first);
      __syncwarp();  // keeps the loads of the next part behind it: they would spill registers
    }
  }
  __device__ __forceinline__ void accumulate_in_parts(const unsigned (&p)[kHeadTiles][2], const KvLayer& layer,
                                                      int64_t base, int tile, int count, int lane) {
#pragma unroll
    for (int first = 0; first < kWide; first += kWidePart) {
      load_v(layer, base, tile, count, lane, first);
      accumulate<kWidePart>(p, lane, first);
      __syncwarp();
    }
  }

  // o += P V in kCount runs of 64 columns from `first` on, which are held.
  template <int kCount = kWide>
  __device__ __forceinline__ void accumulate(const unsigned (&p)[kHeadTiles][2], int lane, int first = 0) {
#pragma unroll
    for (int w = 0; w < kCount; ++w) {
      Pairs pairs[4];
      unsigned scales[2] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = pairs_of(v[i][w]);
      if constexpr (kCodes) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scales[i / 2] |= unsigned(v_scale[i].value[w]) << (16 * (i % 2));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // columns 2i and 2i + 1 of the eight
        unsigned a[4] = {__byte_perm(pairs[0].pair[i], pairs[1].pair[i], 0x5410),
                         __byte_perm(pairs[0].pair[i], pairs[1].pair[i], 0x7632),
                         __byte_perm(pairs[2].pair[i], pairs[3].pair[i], 0x5410),
                         __byte_perm(pairs[2].pair[i], pairs[3].pair[i], 0x7632)};
        if constexpr (kCodes) {
#pragma unroll
          for (int r = 0; r < 4; ++r) a[r] = scaled(a[r], scales[r / 2]);
        }
#pragma unroll
        for (int h = 0; h < kHeadTiles; ++h) multiply<T>(o[h][4 * (first + w) + i], a, p[h][0], p[h][1]);
      }
    }
  }

  // Stores the warp's result in shared memory: largest, sum, o [head][column].
  __device__ __forceinline__ void leave(Shared<kDim, kHeadTiles>& shared, int warp, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
      sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
      sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
      if (t == 0) shared.largest[warp][8 * h + g] = largest[h], shared.sum[warp][8 * h + g] = sum[h];
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
        const int column = 64 * (i / 4) + 8 * g + 2 * (i % 4);
        float* even = &shared.o[warp][8 * h + 2 * t][column];
        *reinterpret_cast<float2*>(even) = make_float2(o[h][i][0], o[h][i][2]);
        *reinterpret_cast<float2*>(even + kDim) = make_float2(o[h][i][1], o[h][i][3]);
      }
    }
  }
};

}  // namespace localq::decoding
