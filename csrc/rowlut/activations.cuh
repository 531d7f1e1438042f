// x as an operand: f16 [rows, in], in shared memory if all its rows fit, else read from global memory.
//
// f16 is used unchanged. In bf16 each row is scaled by a power of two that puts its largest magnitude between 2^14 and
// 2^15: values above 2^-31 of the largest convert to f16 exactly, smaller ones are off by at most 2^-39 of it. Results
// are divided by the scale. A bf16 row with an infinity or NaN gives NaN.
//
// In shared memory the 16 words (of 8 columns) of a step are in the order in which the lanes of a warp read them: word
// i of lane (g, t), columns 32 t + 8 i of the step, is number 4 i + t. The row stride is kXPad bytes off a multiple of
// 128, so two rows use all banks.
#pragma once

#include <type_traits>

#include "common/mma.cuh"
#include "rowlut/table.cuh"

namespace localq::rowlut {

constexpr uint32_t kXPad = 64;
constexpr uint32_t kStepXBytes = 256;  // of x per step: 128 columns
constexpr int kBatch = 8;              // loads of x in flight per thread

// The factor of a row, and that of its results.
struct Scale {
  float up, back;
};

// From the bits of the largest magnitude of a row.
__device__ __forceinline__ Scale scale_of(uint32_t, __half) {
  return {1.f, 1.f};
}
__device__ __forceinline__ Scale scale_of(uint32_t largest, __nv_bfloat16) {
  const int up = min(14 + 127 - int(max(largest >> 7, 1u)), 126);
  if (largest >= 0x7f80u) return {0.f, __int_as_float(0x7fffffff)};
  return {__int_as_float((127 + up) << 23), __int_as_float((127 - up) << 23)};
}

// Whether rows of this type are scaled.
template <typename T>
constexpr bool kScaled = std::is_same_v<T, __nv_bfloat16>;

__device__ __forceinline__ void scale_words(uint32_t (&)[4], float, __half) {
}
__device__ __forceinline__ void scale_words(uint32_t (&words)[4], float up, __nv_bfloat16) {
#pragma unroll
  for (uint32_t& word : words) {
    word = pack(__int_as_float(word << 16) * up, __int_as_float(word & 0xffff0000u) * up, __half{});
  }
}

// The maximum of `largest` and both halves of `words`, as bits without sign: NaN is above infinity, infinity above all
// numbers.
__device__ __forceinline__ void take_largest(uint32_t& largest, const uint4& words) {
  const uint32_t all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (uint32_t word : all) largest = max(largest, max(word & 0x7fffu, word >> 16 & 0x7fffu));
}

// 1 / rms of the only row of x. Called by all threads.
template <typename T>
__device__ __forceinline__ float inverse_rms_of(const RowGemv& p, const T* x, float* scratch) {
  float squares = 0.f;
  for (uint32_t i = threadIdx.x; i < p.in / 8; i += blockDim.x) {
    const Eight<T> eight = reinterpret_cast<const Eight<T>*>(x)[i];
#pragma unroll
    for (int k = 0; k < 8; ++k) squares += to_float(eight.value[k]) * to_float(eight.value[k]);
  }
  return rsqrtf(block_sum(squares, scratch) / p.in + p.extras.eps);
}

// The warps of a row of x, and this thread's words of it: first, first + stride, ..
struct RowShare {
  uint32_t row, first, stride;

  __device__ __forceinline__ explicit RowShare(uint32_t row_bits)
      : row(threadIdx.x / (blockDim.x >> row_bits)),
        first(threadIdx.x % (blockDim.x >> row_bits)),
        stride(blockDim.x >> row_bits) {
  }
};

// Position of a word in shared memory -> its number in x.
__device__ __forceinline__ uint32_t word_at(uint32_t at) {
  return at / 16 * 16 + at % 4 * 4 + at / 4 % 4;
}

// Copies the thread's words of x, zeros past the end of a row, to `staged` unless that is null. Returns the largest.
template <typename T>
__device__ __forceinline__ uint32_t copy_words(const RowLutGemv& p, uint8_t* staged, const T* x, const RowShare& mine,
                                               uint32_t all) {
  const uint32_t words = p.row.in / 8;
  const auto* const from = reinterpret_cast<const uint4*>(x + uint64_t(mine.row) * p.row.in);
  uint32_t largest = 0;
#pragma unroll 1
  for (uint32_t first = mine.first; first < all; first += kBatch * mine.stride) {
    uint4 batch[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const uint32_t at = first + b * mine.stride, word = word_at(at);
      batch[b] = make_uint4(0, 0, 0, 0);
      if (at < all && word < words) batch[b] = from[word];
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const uint32_t at = first + b * mine.stride;
      if (kScaled<T>) take_largest(largest, batch[b]);
      if (staged != nullptr && at < all) *reinterpret_cast<uint4*>(staged + 16 * at) = batch[b];
    }
  }
  return largest;
}

// The thread's words of the only row of x, normalized. Returns the largest.
template <typename T>
__device__ __forceinline__ uint32_t norm_words(const RowLutGemv& p, uint8_t* staged, const RowShare& mine, uint32_t all,
                                               float inverse_rms) {
  uint32_t largest = 0;
#pragma unroll 1
  for (uint32_t at = mine.first; at < all; at += mine.stride) {
    const uint32_t word = word_at(at);
    if (word >= p.row.in / 8) continue;
    uint4 held = *reinterpret_cast<uint4*>(staged + 16 * at);
    auto& eight = reinterpret_cast<Eight<T>&>(held);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      eight.value[k] = normed(eight.value[k], inverse_rms, p.row.extras.norm_weight, 8 * word + k, p.row.extras.norm);
    }
    take_largest(largest, held);
    *reinterpret_cast<uint4*>(staged + 16 * at) = held;
  }
  return largest;
}

// Copies x to shared memory, and stores the bits of each row's largest magnitude in `largest` (zero on entry) for types
// that need it. A thread changes only words that it copied. Called by all threads; the block synchronizes before and
// after.
template <typename T, bool kStaged>
__device__ __forceinline__ void stage(const RowLutGemv& p, uint8_t* staged, uint32_t* largest, const T* x,
                                      float* scratch) {
  if (!kStaged && !kScaled<T>) return;
  const RowShare mine(p.row_bits);
  const uint32_t all = mine.row < uint32_t(p.row.rows) ? 16 * p.steps : 0;
  uint8_t* const to = kStaged ? staged + mine.row * p.row.x_stride : nullptr;
  uint32_t most = copy_words(p, to, x, mine, all);
  if (kStaged && p.row.extras.norm != NormKind::kNone) {
    most = norm_words<T>(p, to, mine, all, inverse_rms_of(p.row, x, scratch));
  }
  if (!kScaled<T>) return;
  most = __reduce_max_sync(~0u, most);
  if (threadIdx.x % 32 == 0 && all > 0) atomicMax(largest + mine.row, most);  // independent of the order
  if (!kStaged) return;
  __syncthreads();
  if (all == 0) return;
  const float up = scale_of(largest[mine.row], T{}).up;
#pragma unroll 2
  for (uint32_t at = mine.first; at < all; at += mine.stride) {
    uint4& held = *reinterpret_cast<uint4*>(to + 16 * at);
    uint32_t words[4] = {held.x, held.y, held.z, held.w};
    scale_words(words, up, T{});
    held = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// The columns of x that a lane reads. Missing rows are not read: `to` keeps its zeros.
template <typename T, bool kStaged>
struct XSource {
  uint32_t at;          // shared-memory address
  const uint8_t* from;  // or global address
  int left;             // of the row, in bytes of W; 0 for a missing row
  float up;

  __device__ __forceinline__ XSource(const RowLutGemv& p, const uint8_t* staged, const uint32_t* largest, const T* x) {
    const uint32_t row = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const bool there = row < uint32_t(p.row.rows);
    at = kept(shared_address(staged) + (there ? row * p.row.x_stride : 0) + 16 * t);
    from = reinterpret_cast<const uint8_t*>(x + uint64_t(there ? row : 0) * p.row.in) + 64 * t;
    left = int(kept(there ? p.row.row_bytes - 16 * t : 0));
    up = kStaged ? 1.f : scale_of(largest[row], T{}).up;
  }

  // Columns 8 word .. 8 word + 7 of the lane's 32 of a step.
  __device__ __forceinline__ void load(uint32_t (&to)[4], uint32_t step, int word) const {
    if (kStaged) return load_shared(to, at + step * kStepXBytes + 64 * word, left);
    const uint4 words = load_x(from + uint64_t(step) * kStepXBytes + 16 * word, left, int(step) * kStepBytes);
    to[0] = words.x, to[1] = words.y, to[2] = words.z, to[3] = words.w;
    scale_words(to, up, T{});
  }
};

}  // namespace localq::rowlut
