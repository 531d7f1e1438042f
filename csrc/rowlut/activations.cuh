// x as it is multiplied: f16 [rows, in], in shared memory where all its rows fit, else read where it is.
//
// x in f16 is multiplied as it is. In bf16 every row has a power of two of its own that puts its largest value between
// 2^14 and 2^15: what is more than 2^-31 of that is f16 then without any rounding, and what is less is off by at most
// 2^-39 of it. The results are divided by it. A row in bf16 that holds infinity or NaN gives NaN.
//
// In shared memory the 16 words (of 8 columns) of a step lie as the lanes of a warp read them together: word i of lane
// (g, t), 32 t + 8 i columns into the step, is number 4 i + t. Rows lie kXPad bytes off 128, so two fill all banks.
#pragma once

#include <type_traits>

#include "common/mma.cuh"
#include "rowlut/table.cuh"

namespace localq::rowlut {

constexpr uint32_t kXPad = 64;
constexpr uint32_t kStepXBytes = 256;  // of x in a step: 128 columns
constexpr int kBatch = 8;              // words of x that a thread has under way

// What a row is multiplied with, and what its results are.
struct Scale {
  float up, back;
};

// By the bits of the largest magnitude of a row.
__device__ __forceinline__ Scale scale_of(uint32_t, __half) {
  return {1.f, 1.f};
}
__device__ __forceinline__ Scale scale_of(uint32_t largest, __nv_bfloat16) {
  const int up = min(14 + 127 - int(max(largest >> 7, 1u)), 126);
  if (largest >= 0x7f80u) return {0.f, __int_as_float(0x7fffffff)};
  return {__int_as_float((127 + up) << 23), __int_as_float((127 - up) << 23)};
}

// Whether rows of the type are scaled at all.
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

// The larger of `largest` and of what is in either half of `words`, as bits without their sign: NaN is above infinity,
// infinity above all numbers.
__device__ __forceinline__ void take_largest(uint32_t& largest, const uint4& words) {
  const uint32_t all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (uint32_t word : all) largest = max(largest, max(word & 0x7fffu, word >> 16 & 0x7fffu));
}

// 1 / rms of the only row of x; all threads.
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

// The warps of a row of x, and what of it is this thread's: words first, first + stride, ..
struct RowShare {
  uint32_t row, first, stride;

  __device__ __forceinline__ explicit RowShare(uint32_t row_bits)
      : row(threadIdx.x / (blockDim.x >> row_bits)),
        first(threadIdx.x % (blockDim.x >> row_bits)),
        stride(blockDim.x >> row_bits) {
  }
};

// Word `at` of a row as it lies in shared memory -> which one of x it is.
__device__ __forceinline__ uint32_t word_at(uint32_t at) {
  return at / 16 * 16 + at % 4 * 4 + at / 4 % 4;
}

// The thread's words of x, zeros behind the end of a row: to `staged`, unless that is null. Returns the largest.
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

// The thread's words of the only row of x, normed. Returns the largest.
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

// x to shared memory, and the bits of the largest magnitude of every row, which must be zeros, to `largest` where the
// type needs them. Each thread changes only what it copied. All threads; the block synchronises before and after.
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
  if (threadIdx.x % 32 == 0 && all > 0) atomicMax(largest + mine.row, most);  // the same whatever the order
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

// Where the lane reads its columns of its row of x. Of rows that are not there it reads nothing: `to` keeps the zeros
// that it has.
template <typename T, bool kStaged>
struct XSource {
  uint32_t at;          // in shared memory
  const uint8_t* from;  // or where x is
  int left;             // of the row, in bytes of W; 0 without a row
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
