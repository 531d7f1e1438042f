// y = x W^T + bias for 1 to 8 rows of x, W stored as NF4 (nf4.cuh), x, bias and y in f16 or bf16, sums in f32.
// Needs in % 64 == 0; out is free. Deterministic: every sum has one order, there are no atomics.
//
// A tile is 16 outputs. `split` warps share a tile, each takes a contiguous part of its 64-column blocks; their partial
// sums meet in shared memory. Blocks are persistent: they keep the table and walk over the tiles.
//
// One block of columns of one tile is four m16n8k16 products with W as the 16-row operand A and x as B (8 columns, one
// per row of x). Which column an index k of the product means is free as long as A and B agree: lane (g, t) = (lane /
// 4, lane % 4) holds columns 16t .. 16t+15 of rows g and g+8, that is 8 bytes of codes each, straight from the
// checkpoint's layout, and product j takes its bytes 2j and 2j+1. A byte is one register of A after a look-up: the
// table byte -> pair of values stands once per lane (32 KB), so no two lanes of a warp ever meet in a bank. The sum of
// a block is multiplied by its absmax in f32.
//
// Bound: memory. Reads out*in*(1/2 + 1/64 + 4/16384) bytes once; x comes from L1. Per weight: 0.5 shared-memory
// look-ups, each of which takes a shift and a LOP3 for its address; csrc/README.md has the counts of all instructions.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "check.h"
#include "launchers.h"
#include "nf4.cuh"

namespace localq {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kTile = 16;        // outputs of a tile
constexpr int kRows = 8;         // rows of x, the width of the product
constexpr int kStep = 4;         // column blocks in flight; lane t decodes the scales of block t of them
constexpr int kBlocksPerSm = 2;  // up to 128 registers a thread; 3 blocks would spill

struct Shared {
  uint32_t table[256][32];  // [byte][lane]: two values of x's type, low half = even column
  float nested_map[kNestedMapSize];
  float partial[kWarps][kTile][kRows];
};

__device__ __forceinline__ uint32_t pack(float low, float high, __half) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ uint32_t pack(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// The table holds the 16 values times this, and every sum is divided by it: where a value falls between two numbers of
// type T is chance, and with this factor (the best of 2^23 between 1 and 2) the worst is rounded by half as much.
template <typename T>
__device__ constexpr float kTableScale = 0.f;
template <>
__device__ constexpr float kTableScale<__half> = 1.6384992599487305f;  // worst relative error 1.6e-4, 3.3e-4 without
template <>
__device__ constexpr float kTableScale<__nv_bfloat16> = 1.1888107061386108f;  // 1.6e-3, 3.1e-3 without

template <typename T>
__device__ void fill_tables(const Nf4& w, bool nested, Shared& s) {
  const int lane = threadIdx.x % 32;
  for (int byte = threadIdx.x / 32; byte < 256; byte += kWarps) {
    const float even = w.code_map[byte >> 4] * kTableScale<T>, odd = w.code_map[byte & 15] * kTableScale<T>;
    s.table[byte][lane] = pack(even, odd, T{});
  }
  if (nested) s.nested_map[threadIdx.x] = w.nested_map[threadIdx.x];
  __syncthreads();
}

// Byte k of `word` -> its pair of values, from the lane's column of the table. A row is 128 bytes, so the offset of the
// lane and that of the byte have no bit in common, and one LOP3 joins them.
__device__ __forceinline__ uint32_t look_up(const Shared& s, uint32_t lane_offset, uint32_t word, int k) {
  const uint32_t shifted = k == 0 ? word << 7 : word >> (8 * k - 7);
  const uint32_t offset = (shifted & 0x7f80u) | lane_offset;
  return *reinterpret_cast<const uint32_t*>(reinterpret_cast<const char*>(s.table) + offset);
}

__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __half) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __nv_bfloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c = the 16 x 64 block of W whose codes the lane holds as low (row g) and high (row g + 8), times x.
template <typename T>
__device__ __forceinline__ void multiply_block(float (&c)[4], const Shared& s, uint32_t lane_offset, uint2 low,
                                               uint2 high, const uint4 (&x)[2]) {
  const uint32_t words[2][2] = {{low.x, low.y}, {high.x, high.y}};
  const uint32_t b[8] = {x[0].x, x[0].y, x[0].z, x[0].w, x[1].x, x[1].y, x[1].z, x[1].w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int word = j / 2, byte = 2 * (j % 2);
    const uint32_t a[4] = {look_up(s, lane_offset, words[0][word], byte), look_up(s, lane_offset, words[1][word], byte),
                           look_up(s, lane_offset, words[0][word], byte + 1),
                           look_up(s, lane_offset, words[1][word], byte + 1)};
    mma(c, a, b[2 * j], b[2 * j + 1], T{});
  }
}

// The lane's 16 columns of a block of its row of x, or zeros. volatile keeps the order against the products: the
// compiler would otherwise load x of all blocks in flight first, and spill.
__device__ __forceinline__ void load_x(uint4 (&values)[2], const uint4* block, bool has_row) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    values[i] = make_uint4(0, 0, 0, 0);
    if (has_row) {
      asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(values[i].x), "=r"(values[i].y), "=r"(values[i].z), "=r"(values[i].w)
                   : "l"(block + i));
    }
  }
}

// What a lane reads of one tile: where its codes, its scales and its columns of x begin. Rows g and g + 8.
struct Lane {
  const uint2 *low_codes, *high_codes;  // block b of columns is 4 b further
  uint32_t low_block, high_block;       // index of the row's first block
  const uint4* x;                       // block b is 8 b further
  uint32_t table_offset;
  bool has_row;  // of x
};

template <typename T>
__device__ __forceinline__ Lane lane_of(const Nf4& w, const T* x, int64_t tile, int rows, int64_t out, int blocks) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  // Outputs past the end read the last one; they are not written.
  const uint32_t low = uint32_t(min(tile * kTile + g, out - 1)) * blocks;
  const uint32_t high = uint32_t(min(tile * kTile + g + 8, out - 1)) * blocks;
  return {reinterpret_cast<const uint2*>(w.codes + int64_t(low) * (kBlock / 2)) + t,
          reinterpret_cast<const uint2*>(w.codes + int64_t(high) * (kBlock / 2)) + t,
          low,
          high,
          reinterpret_cast<const uint4*>(x + int64_t(g) * blocks * kBlock) + 2 * t,
          4u * lane,
          g < rows};
}

// The codes of kStep blocks of columns, and the scales of block t of them.
struct Step {
  uint2 low[kStep], high[kStep];
  StoredAbsmax low_absmax, high_absmax;
};

// Blocks b .. b + kStep - 1; those past the end, which only a step that is not kFull has, repeat the last one.
template <bool kNested, bool kFull>
__device__ __forceinline__ void load_step(Step& step, const Nf4& w, const Lane& lane, int b, int end) {
#pragma unroll
  for (int u = 0; u < kStep; ++u) {
    const int at = kFull ? b + u : min(b + u, end - 1);
    step.low[u] = __ldcs(lane.low_codes + 4 * at);
    step.high[u] = __ldcs(lane.high_codes + 4 * at);
  }
  const int t = threadIdx.x % 4, at = kFull ? b + t : min(b + t, end - 1);
  step.low_absmax = load_absmax<kNested>(w, lane.low_block + at);
  step.high_absmax = load_absmax<kNested>(w, lane.high_block + at);
}

// sum += scale of the block * block of W * block of x, for the blocks of the step that lie before the end.
template <typename T, bool kNested, bool kFull>
__device__ __forceinline__ void add_step(float (&sum)[4], const Step& step, const Nf4& w, const Shared& s,
                                         const Lane& lane, int b, int end) {
  const int first_of_row = threadIdx.x % 32 / 4 * 4;  // the lanes of a row hold the scales of the kStep blocks
  const float low_scale = decode_absmax<kNested>(step.low_absmax, s.nested_map, w.offset);
  const float high_scale = decode_absmax<kNested>(step.high_absmax, s.nested_map, w.offset);
#pragma unroll
  for (int u = 0; u < kStep; ++u) {
    uint4 values[2];
    load_x(values, lane.x + 8 * (kFull ? b + u : min(b + u, end - 1)), lane.has_row);
    float c[4] = {};
    multiply_block<T>(c, s, lane.table_offset, step.low[u], step.high[u], values);
    const float low = __shfl_sync(~0u, low_scale, first_of_row + u);
    const float high = __shfl_sync(~0u, high_scale, first_of_row + u);
    if (kFull || b + u < end) {
      sum[0] += low * c[0];
      sum[1] += low * c[1];
      sum[2] += high * c[2];
      sum[3] += high * c[3];
    }
  }
}

// The partial sums of one warp over column blocks [begin, end) of a tile: sum[0..1] = output g, rows 2t and 2t+1 of x;
// sum[2..3] = output g + 8.
template <typename T, bool kNested>
__device__ __forceinline__ void sum_tile(float (&sum)[4], const Nf4& w, const Shared& s, const Lane& lane, int begin,
                                         int end) {
  int b = begin;
#pragma unroll 1
  for (; b + kStep <= end; b += kStep) {
    Step step;
    load_step<kNested, true>(step, w, lane, b, end);
    add_step<T, kNested, true>(sum, step, w, s, lane, b, end);
  }
  if (b < end) {
    Step step;
    load_step<kNested, false>(step, w, lane, b, end);
    add_step<T, kNested, false>(sum, step, w, s, lane, b, end);
  }
}

// Adds the `split` partial sums of every tile of this block in order and writes y [rows, out].
template <typename T>
__device__ void write_tiles(const Shared& s, const T* bias, T* y, int tile, int split, int rows, int out) {
#pragma unroll 1
  for (int i = threadIdx.x; i < kWarps / split * kTile * kRows; i += kThreads) {
    const int group = i / (kTile * kRows), row = i / kTile % kRows, column = i % kTile;
    const int o = (tile + group) * kTile + column;
    if (row >= rows || o >= out) continue;
    float total = 0.f;
#pragma unroll 1
    for (int k = 0; k < split; ++k) total += s.partial[group * split + k][column][row];
    total *= 1.f / kTableScale<T>;
    if (bias != nullptr) total += float(bias[o]);
    y[int64_t(row) * out + o] = T(total);
  }
}

template <typename T, bool kNested>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) nf4_gemv_kernel(const Nf4 w,
                                                                          const T* __restrict__ x,     // [rows, in]
                                                                          const T* __restrict__ bias,  // [out] or null
                                                                          T* __restrict__ y,           // [rows, out]
                                                                          int rows, int out,
                                                                          int blocks,   // in / 64
                                                                          int split) {  // warps per tile
  __shared__ Shared s;
  fill_tables<T>(w, kNested, s);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int tiles = (out + kTile - 1) / kTile, together = kWarps / split;  // tiles of a block at a time
  const int begin = blocks * (warp % split) / split, end = blocks * (warp % split + 1) / split;
#pragma unroll 1
  for (int tile = blockIdx.x * together; tile < tiles; tile += gridDim.x * together) {
    float sum[4] = {};
    const int own = tile + warp / split;
    if (own < tiles) sum_tile<T, kNested>(sum, w, s, lane_of(w, x, own, rows, out, blocks), begin, end);
#pragma unroll
    for (int i = 0; i < 4; ++i) s.partial[warp][g + 8 * (i / 2)][2 * t + i % 2] = sum[i];
    __syncthreads();
    write_tiles<T>(s, bias, y, tile, split, rows, out);
    __syncthreads();
  }
}

// Warps per tile: one where there are tiles for every warp, else as many as leave each two blocks of columns: what a
// short matrix costs is the latency of one warp's steps, one after the other.
int choose_split(int64_t tiles, int blocks, int sms) {
  int split = 1;
  while (split < kWarps && blocks / (2 * split) >= 2 && tiles * split < int64_t(sms) * kBlocksPerSm * kWarps) {
    split *= 2;
  }
  return split;
}

template <typename T>
void launch(const Nf4& w, const void* x, const void* bias, void* y, int rows, int64_t out, int64_t in, int sms,
            cudaStream_t stream) {
  const int64_t tiles = (out + kTile - 1) / kTile;
  const int blocks = int(in / kBlock), split = choose_split(tiles, blocks, sms);
  const int64_t together = kWarps / split, wanted = (tiles + together - 1) / together;
  const int grid = int(wanted < int64_t(sms) * kBlocksPerSm ? wanted : int64_t(sms) * kBlocksPerSm);
  auto* kernel = w.nested_absmax != nullptr ? nf4_gemv_kernel<T, true> : nf4_gemv_kernel<T, false>;
  kernel<<<grid, kThreads, 0, stream>>>(w, static_cast<const T*>(x), static_cast<const T*>(bias), static_cast<T*>(y),
                                        rows, int(out), blocks, split);
  check_cuda(cudaGetLastError(), "nf4_gemv");
}

}  // namespace

void nf4_gemv(const Nf4& w, const void* x, const void* bias, void* y, Type type, int rows, int64_t out, int64_t in,
              int device, cudaStream_t stream) {
  constexpr const char* op = "nf4_gemv";
  require(rows >= 1 && rows <= kRows, op, "rows", rows, "must be from 1 to 8");
  require(out >= 1, op, "out", out, "must be positive");
  require(in >= kBlock && in % kBlock == 0, op, "in", in, "must be a positive multiple of 64");
  require(in <= 1 << 24, op, "in", in, "must be at most 2^24");
  require(out <= (1 << 30) && out * (in / kBlock) < (int64_t(1) << 32), op, "out", out, "is too large");
  require_nf4(w, op);
  require_aligned(x, 16, op, "x");
  require_aligned(y, 2, op, "y");
  require(type != Type::kFloat32, op, "dtype", static_cast<int>(type), "must be float16 or bfloat16");
  const DeviceGuard guard(device, op);
  const int sms = multiprocessors(device, op);
  if (type == Type::kFloat16) return launch<__half>(w, x, bias, y, rows, out, in, sms, stream);
  launch<__nv_bfloat16>(w, x, bias, y, rows, out, in, sms, stream);
}

}  // namespace localq
