// out = rows row_begin .. row_begin + row_count - 1 of a matrix in 4 bits with 16 values a row (rowlut.h) as f16, bf16
// or f32, row by row: bit for bit the f16 values of the table, rounded once where out is bf16.
//
// A thread has the 16 values of a row in 8 registers, low bytes and high bytes apart, and takes kUnroll words of 8
// codes of it, all loaded before the first use: PRMT picks four bytes by four codes, once of the values below 8 and
// once of those above, and once more which of the two. A warp reads 128 and writes 512 contiguous bytes at a time;
// where codes lie in tiles it reads 64 twice, and the warps of a block what lies between. Needs in % 8 == 0. Bound:
// memory. Moves out * (in (1/2 + sizeof(T)) + 32) bytes.
#include "common/launch.h"
#include "common/rounding.cuh"
#include "common/row_loads.cuh"
#include "rowlut/rowlut.h"

namespace localq {
namespace {

constexpr const char* kOp = "rowlut_dequantize";
constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kWeights = 8;  // of a word of codes
constexpr int kUnroll = 4;
constexpr int kGroupBits = 3, kGroupRows = 1 << kGroupBits;  // of codes in tiles
constexpr uint32_t kStepWords = 16;                          // of a row of a tile
constexpr uint32_t kChunk = 32 * kUnroll * kWeights;         // columns of a warp

struct ByteTable {
  uint32_t low[4], high[4];  // bytes of entries 4 i .. 4 i + 3
};

__device__ __forceinline__ ByteTable byte_table(const uint4 (&row)[2]) {
  const uint32_t words[8] = {row[0].x, row[0].y, row[0].z, row[0].w, row[1].x, row[1].y, row[1].z, row[1].w};
  ByteTable table;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    table.low[i] = __byte_perm(words[2 * i], words[2 * i + 1], 0x6420);
    table.high[i] = __byte_perm(words[2 * i], words[2 * i + 1], 0x7531);
  }
  return table;
}

// Bytes of four entries by the four codes that `entry` and `upper` hold: three bits of each, and 4 where the fourth is
// set, on top of the place.
__device__ __forceinline__ uint32_t four_of(const uint32_t (&bytes)[4], uint32_t entry, uint32_t upper) {
  return __byte_perm(__byte_perm(bytes[0], bytes[1], entry), __byte_perm(bytes[2], bytes[3], entry), upper);
}

// The f16 values of eight codes, two a word.
__device__ __forceinline__ void decode(uint32_t (&pairs)[4], const ByteTable& table, uint32_t codes) {
  const uint32_t entries = codes & 0x77777777u, uppers = codes >> 1 & 0x44444444u | 0x32103210u;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t entry = entries >> (16 * half), upper = uppers >> (16 * half);
    const uint32_t low = four_of(table.low, entry, upper), high = four_of(table.high, entry, upper);
    pairs[2 * half] = __byte_perm(low, high, 0x5140);
    pairs[2 * half + 1] = __byte_perm(low, high, 0x7362);
  }
}

__device__ __forceinline__ void write(__half* out, const uint32_t (&pairs)[4]) {
  *reinterpret_cast<uint4*>(out) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}
template <typename T>
__device__ __forceinline__ void write(T* out, const uint32_t (&pairs)[4]) {
  constexpr int kRun = 16 / sizeof(T);  // of a store
#pragma unroll
  for (int first = 0; first < kWeights; first += kRun) {
    Run<T, kRun> run;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const uint16_t bits = uint16_t(pairs[(first + i) / 2] >> ((first + i) % 2 * 16));
      round_to(to_float(reinterpret_cast<const __half&>(bits)), run.value[i]);
    }
    *reinterpret_cast<Run<T, kRun>*>(out + first) = run;
  }
}

// The codes of a row, in tiles or row by row.
struct Codes {
  const uint32_t* row;
  uint32_t apart;  // words between a step of 64 bytes and the next, in such steps

  __device__ __forceinline__ Codes(const RowLut& w, int64_t number, uint32_t words)
      : row(reinterpret_cast<const uint32_t*>(w.codes) + number * words), apart(w.tiled ? kGroupRows - 1 : 0) {
    if (w.tiled) row -= int64_t(number % kGroupRows) * (words - kStepWords);
  }

  __device__ __forceinline__ uint32_t word(uint32_t number) const {
    return __ldcs(row + number + apart * (number / kStepWords * kStepWords));
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    rowlut_dequantize_kernel(const RowLut w, T* out,  // of row row_begin on
                             int64_t row_begin, int64_t row_count, uint32_t chunks) {
  // Warps behind each other take a chunk of eight rows where codes lie in tiles.
  const int64_t task = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  const uint32_t row_bits = w.tiled ? kGroupBits : 0, of_rows = chunks << row_bits, rest = uint32_t(task % of_rows);
  const int64_t row = (task / of_rows << row_bits) + (rest & ((1 << row_bits) - 1));
  const int64_t held = row_begin + (row < row_count ? row : row_count - 1);
  const uint32_t words = uint32_t(w.in / kWeights), first = (rest >> row_bits) * (kChunk / kWeights);
  const Codes codes(w, held, words);
  uint32_t word[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) word[u] = codes.word(min(first + 32 * u + threadIdx.x % 32, words - 1));
  const auto* entries = static_cast<const uint4*>(w.table) + held * 2;
  const uint4 of_row[2] = {__ldg(entries), __ldg(entries + 1)};
  const ByteTable table = byte_table(of_row);
  dependency_wait();
  release_dependents();
  if (row >= row_count) return;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const uint32_t at = first + 32 * u + threadIdx.x % 32;
    if (at >= words) return;
    uint32_t pairs[4];
    decode(pairs, table, word[u]);
    write(out + row * w.in + uint64_t(at) * kWeights, pairs);
  }
}

template <typename T>
void launch_typed(const RowLut& w, void* out, int64_t row_begin, int64_t row_count, int device, cudaStream_t stream) {
  const int64_t chunks = (w.in + kChunk - 1) / kChunk, group = w.tiled ? kGroupRows : 1;
  const int64_t tasks = (row_count + group - 1) / group * group * chunks, blocks = (tasks + kWarps - 1) / kWarps;
  require(blocks <= INT32_MAX, kOp, "out", w.out, "is too large for one launch");
  launch(kOp, device, rowlut_dequantize_kernel<T>, dim3(uint32_t(blocks)), dim3(kThreads), 0, stream, w,
         static_cast<T*>(out), row_begin, row_count, uint32_t(chunks));
}

}  // namespace

void rowlut_dequantize(const RowLut& w, void* out, Type type, int64_t row_begin, int64_t row_count, int device,
                       cudaStream_t stream) {
  require(w.in >= 8 && w.in % 8 == 0, kOp, "in", w.in, "must be a positive multiple of 8");
  require(w.in <= 1 << 24, kOp, "in", w.in, "must be at most 2^24");
  require(w.out >= 1 && w.out <= 1 << 30, kOp, "out", w.out, "must be positive and not larger");
  require(row_begin >= 0 && row_begin < w.out, kOp, "row_begin", row_begin, "is not a row of the matrix");
  require(row_count > 0 && row_count <= w.out - row_begin, kOp, "row_count", row_count, "is not within the matrix");
  check_rowlut_tiles(w, kOp);
  require_aligned(w.codes, 4, kOp, "codes");
  require_aligned(w.table, 16, kOp, "table");
  require_aligned(out, 16, kOp, "out");
  const DeviceGuard guard(device, kOp);
  if (type == Type::kFloat16) return launch_typed<__half>(w, out, row_begin, row_count, device, stream);
  if (type == Type::kBFloat16) return launch_typed<__nv_bfloat16>(w, out, row_begin, row_count, device, stream);
  launch_typed<float>(w, out, row_begin, row_count, device, stream);
}

}  // namespace localq
