// y = x W^T + bias for 9 and more rows of x, W stored as NF4 (layout.cuh) in either order; x, y and bias in f16 or
// bf16, sums in f32, rounded once. Deterministic: every sum has one order. 64 rows of x at a time; more read W again.
//
// A block owns some tiles of 16 rows of W and goes through the columns of x in stages of 1 to 8 blocks of 64, brought
// to shared memory by cp.async, two to four stages of them in flight or in use. A warp has two tiles, for all rows of
// x, and one of the blocks of 64 of every stage: what it reads of x serves 32 rows of W, and its sums stay in registers
// until the end, when those of the warps with the same tiles are added in the order of their columns.
//
// A block of 64 of a tile costs 16 PRMT, 16 look-ups and some 20 instructions for its two scales, and for each 8 rows
// of x 4 products, 4 FFMA and half of 2 loads of 16 bytes. Bound, by counts: memory up to 16 rows on an RTX 3090 and 32
// on a 4090, then tensor cores; on an H200 instructions, 1.7 times what memory takes at 16 rows. Reads out*in*(1/2 +
// 1/64 + 4/16384) bytes once, and x once per multiprocessor, from L2. Quick are whole tiles in tiled order with nested
// absmax; of others, scales are read when they are needed.
#include "nf4/gemm_stages.cuh"

namespace localq {
namespace {

using namespace gemm;

constexpr int kMostDepth = 4;
constexpr int kShareRow = 20;  // floats from a row of x to the next: 16 results, and all banks are filled
constexpr int kShareBytes = kTilesOfWarp * 8 * kShareRow * 4;  // of a warp, for 8 rows of x

// The most threads that registers allow; the launcher asks the kernel. For compute capability 10.0 and 12.0 ptxas needs
// more of them for 64 rows of x: it spills 4 to 16 bytes with 128.
template <int kRowTiles>
__device__ constexpr int most_threads() {
#if __CUDA_ARCH__ >= 1000
  return kRowTiles == 8 ? 384 : 512;
#else
  return 512;
#endif
}

// Scales of rows g and g + 8 of tile j of the warp in `block`.
__device__ __forceinline__ float2 scales_of(const Nf4Gemv& p, const Shared& s, const Work& work, const uint8_t* stage,
                                            int j, uint32_t block) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, tile = work.tile(j);
  const Nf4Segment& w = p.segment[0];
  if (!is_quick(p, work, block)) {
    return {load_scale(p, w, tile, g, block), load_scale(p, w, tile, g + 8, block)};
  }
  const uint32_t word = reinterpret_cast<const uint32_t*>(stage + kTilesOfWarp * kTileWords * 16)[j * 8 + g];
  const uint32_t base = tile * kTile * p.blocks, low = base + g * p.blocks + block, high = low + 8 * p.blocks;
  const float* nested = s.tiles.nested + work.local(j) * s.tiles.stride - base / kNestedBlock;
  const float a = __uint_as_float(look_up(s.table, 4 * lane + 128, word, block % 2));
  const float b = __uint_as_float(look_up(s.table, 4 * lane + 128, word, block % 2 + 2));
  return {__fadd_rn(__fmul_rn(a, nested[low / kNestedBlock]), w.offset),
          __fadd_rn(__fmul_rn(b, nested[high / kNestedBlock]), w.offset)};
}

// Half a block of 64 of x. volatile keeps x of later rows from being loaded before there are registers for it.
__device__ __forceinline__ void load_x(uint32_t* b, const uint4* x) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(uint32_t(__cvta_generic_to_shared(x))));
}

// The operand of W for the four products that a block of 64 of a tile takes, from its codes in shared memory.
__device__ __forceinline__ void look_up_all(uint32_t (&a)[4][4], const uint8_t* table, const uint8_t* codes) {
  const uint32_t lane = threadIdx.x % 32;
  const uint4 words = reinterpret_cast<const uint4*>(codes)[lane];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = i < 2 ? words.x : words.y, high = i < 2 ? words.z : words.w;
#pragma unroll
    for (int k = 0; k < 4; ++k) a[i][k] = look_up(table, 4 * lane, k % 2 ? high : low, 2 * (i % 2) + k / 2);
  }
}

// sum += scale * (16 rows x 64 columns of two tiles, times all rows of x).
template <typename T, int kRowTiles>
__device__ __forceinline__ void multiply(float (&sum)[kTilesOfWarp][kRowTiles][4], const uint8_t* table,
                                         const uint8_t* codes, const uint4* x, const float2 (&scale)[kTilesOfWarp],
                                         uint32_t rows) {
  const uint32_t lane = threadIdx.x % 32;
  uint32_t a[kTilesOfWarp][4][4];
#pragma unroll
  for (int j = 0; j < kTilesOfWarp; ++j) look_up_all(a[j], table, codes + j * kTileWords * 16);
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
    if (n > 0 && n % 2 == 0 && 8 * n >= rows)
      break;  // ragged last rows; it also keeps ptxas from loading x of all rows at once
    uint32_t b[4];
    float c[kTilesOfWarp][4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i % 2 == 0) load_x(b, x + n * kXWords + i / 2 * kXSecondHalf + lane);
#pragma unroll
      for (int j = 0; j < kTilesOfWarp; ++j) mma(c[j], a[j][i], b[i % 2 * 2], b[i % 2 * 2 + 1], T{});
    }
#pragma unroll
    for (int j = 0; j < kTilesOfWarp; ++j) {
#pragma unroll
      for (int k = 0; k < 4; ++k) sum[j][n][k] += (k < 2 ? scale[j].x : scale[j].y) * c[j][k];
    }
  }
}

// Goes through the stages; those before `depth - 1` are under way.
template <typename T, int kRowTiles>
__device__ __forceinline__ void sum_stages(float (&sum)[kTilesOfWarp][kRowTiles][4], const Nf4Gemv& p, const Shared& s,
                                           const Cut& cut, Work work, const T* x, uint32_t all_rows) {
  const uint32_t stages = (p.blocks + cut.parts - 1) / cut.parts;
  uint32_t slot = 0;
#pragma unroll 1
  for (uint32_t stage = 0; stage < stages; ++stage) {
    // not to be known as the same every time: what follows from it would be kept in registers that there are not
    asm volatile("" : "+r"(work.unit), "+r"(work.packed), "+r"(slot), "+r"(stage));
    wait_for_oldest(cut.depth);
    __syncthreads();  // the stage is there for all, and the one before it is read by all
    const uint32_t next = stage + cut.depth - 1, free = slot == 0 ? cut.depth - 1 : slot - 1;
    if (next < stages) {
      bring_weights<kRowTiles>(p, s, cut, work, next, free);
      bring_x<T, kRowTiles>(p, s, cut, x, all_rows, next, free);
    }
    commit();  // also where there is nothing, so that the count of groups stays the same
    const uint32_t block = stage * cut.parts + work.part();
    if (block < p.blocks) {
      const uint8_t* codes = warp_stage<kRowTiles>(s, cut, work, slot);
      const float2 scale[kTilesOfWarp] = {scales_of(p, s, work, codes, 0, block),
                                          scales_of(p, s, work, codes, 1, block)};
      const auto* staged = reinterpret_cast<const uint4*>(s.stages + slot * cut.stage_bytes);
      multiply<T, kRowTiles>(sum, s.table, codes, staged + work.part() * kRowTiles * kXWords, scale,
                             all_rows - blockIdx.y * kRowsAtOnce);
    }
    slot = slot + 1 == cut.depth ? 0 : slot + 1;
  }
}

// Adds the sums of the warps that share tiles, and writes: 8 rows of x at a time, through shared memory.
template <typename T, int kRowTiles>
__device__ __forceinline__ void write_tiles(const float (&sum)[kTilesOfWarp][kRowTiles][4], const Nf4Gemv& p,
                                            const Shared& s, const Cut& cut, const Work& work, uint32_t all_rows,
                                            void* y) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  auto* const shares = reinterpret_cast<float*>(s.stages);  // [parts][pairs * 2 tiles][8 rows of x][kShareRow]
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kTilesOfWarp; ++j) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t row = 2 * t + k % 2, o = g + k / 2 * 8;
        shares[((threadIdx.x / 32 * kTilesOfWarp + j) * 8 + row) * kShareRow + o] = sum[j][n][k];
      }
    }
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < work.tiles() * kTile * 8; i += blockDim.x) {
      const uint32_t r = i % kTile, tile = i / kTile % work.tiles(), row = i / kTile / work.tiles();
      const uint32_t o = (work.unit + tile) * kTile + r, x_row = blockIdx.y * kRowsAtOnce + n * 8 + row;
      if (x_row >= all_rows || o >= p.segment[0].out) continue;
      float total = 0.f;
      for (uint32_t part = 0; part < cut.parts; ++part) {
        total += shares[((part * cut.pairs * kTilesOfWarp + tile) * 8 + row) * kShareRow + r];
      }
      write_result<T>(p, {work.unit + tile}, o, x_row, total, 0.f, y);
    }
  }
}

template <typename T, int kRowTiles>
__global__ void __launch_bounds__(most_threads<kRowTiles>(), 1)
    nf4_gemm_kernel(const __grid_constant__ Nf4Gemv p, const T* x, void* y, uint32_t all_rows,
                    const __grid_constant__ Cut cut) {
  extern __shared__ __align__(16) uint8_t memory[];
  uint8_t* const tiles = memory + kTableBytes;
  const Shared s = {memory, tiles + cut.tiles_bytes, TileTable(tiles, cut.most_tiles, p.blocks)};
  const Work work = work_of(p, cut);
  const uint32_t stages = (p.blocks + cut.parts - 1) / cut.parts, ahead = min(cut.depth - 1, stages);
  for (uint32_t stage = 0; stage < ahead; ++stage) bring_weights<kRowTiles>(p, s, cut, work, stage, stage);
  TilePlace place = {};
  float nested = 0.f;
  if (threadIdx.x < work.tiles() * s.tiles.stride) {
    nested = nested_at(place, p, s.tiles.stride, work.unit, threadIdx.x);
  }
  fill_table<T>(s.table, p.code_map, p.nested_map);
  fill_tiles(s.tiles, p, work.unit, work.tiles(), nested, place);
  dependency_wait();
  release_dependents();
  for (uint32_t stage = 0; stage < cut.depth - 1; ++stage) {
    if (stage < stages) bring_x<T, kRowTiles>(p, s, cut, x, all_rows, stage, stage);
    commit();
  }
  float sum[kTilesOfWarp][kRowTiles][4] = {};
  sum_stages<T, kRowTiles>(sum, p, s, cut, work, x, all_rows);
  write_tiles<T, kRowTiles>(sum, p, s, cut, work, all_rows, y);
}

// The cut for blocks of at most `tiles` tiles: as many warps as there may be, and as deep as shared memory lets it be.
// depth 0: not even the smallest fits.
Cut cut_for(uint32_t tiles, uint32_t blocks, int row_tiles, uint32_t most_warps, uint32_t budget) {
  Cut cut = {};
  cut.pairs = (tiles + kTilesOfWarp - 1) / kTilesOfWarp;
  cut.most_tiles = tiles;
  cut.tiles_bytes = (TileTable::bytes(tiles, blocks) + 15) / 16 * 16;
  if (cut.pairs > most_warps || cut.tiles_bytes >= budget) return cut;
  for (cut.parts = kChunk; cut.parts > 0; cut.parts /= 2) {
    const uint32_t warps = cut.pairs * cut.parts;
    if (warps > most_warps || (cut.parts > blocks && cut.parts > 1)) continue;
    cut.stage_bytes = cut.parts * row_tiles * kXWords * 16 + warps * kWarpStageBytes;
    cut.depth = (budget - cut.tiles_bytes) / cut.stage_bytes;
    if (cut.depth > kMostDepth) cut.depth = kMostDepth;
    const bool shares_fit = budget - cut.tiles_bytes >= warps * kShareBytes;
    if (cut.depth >= 2 && shares_fit) return cut;
  }
  cut.depth = 0;
  return cut;
}

template <typename T, int kRowTiles>
void launch_typed(Nf4Gemv p, const void* x, void* y, int64_t rows, int device, cudaStream_t stream) {
  constexpr const char* op = "nf4_gemm";
  const DeviceFacts& facts = device_facts(device, op);
  const uint32_t budget = facts.shared_bytes_per_block - kTableBytes, sms = facts.multiprocessors;
  cudaFuncAttributes of_kernel;
  check_cuda(cudaFuncGetAttributes(&of_kernel, nf4_gemm_kernel<T, kRowTiles>), op);
  Cut cut = {};
  uint32_t grid = 0, waves = 0;
  do {  // whole waves of blocks, all of about the same size
    grid = p.units < sms * ++waves ? p.units : sms * waves;
    cut = cut_for((p.units + grid - 1) / grid, p.blocks, kRowTiles, of_kernel.maxThreadsPerBlock / 32, budget);
  } while (cut.depth == 0 && grid < p.units);
  require(cut.depth > 0, op, "in", p.blocks * kBlock, "is too large for the shared memory of this device");
  const uint32_t warps = cut.pairs * cut.parts, stages = cut.depth * cut.stage_bytes, shares = warps * kShareBytes;
  const dim3 groups(grid, uint32_t((rows + kRowsAtOnce - 1) / kRowsAtOnce));
  launch(op, device, nf4_gemm_kernel<T, kRowTiles>, groups, dim3(32 * warps),
         kTableBytes + cut.tiles_bytes + (stages > shares ? stages : shares), stream, p, static_cast<const T*>(x), y,
         uint32_t(rows), cut);
}

template <typename T>
void launch_rows(const Nf4Gemv& p, const void* x, void* y, int64_t rows, int device, cudaStream_t stream) {
  if (rows <= 16) return launch_typed<T, 2>(p, x, y, rows, device, stream);
  if (rows <= 32) return launch_typed<T, 4>(p, x, y, rows, device, stream);
  launch_typed<T, 8>(p, x, y, rows, device, stream);
}

}  // namespace

void nf4_gemm(const Nf4& w, const void* bias, const void* x, void* y, Type type, int64_t rows, int device,
              cudaStream_t stream) {
  constexpr const char* op = "nf4_gemm";
  require(rows >= 1 && rows <= 65535 * kRowsAtOnce, op, "rows", rows, "must be from 1 to 4194240");
  require(w.in >= kBlock && w.in % kBlock == 0, op, "in", w.in, "must be a positive multiple of 64");
  require(w.in <= 1 << 24, op, "in", w.in, "must be at most 2^24");
  require(w.out >= 1, op, "out", w.out, "must be positive");
  require(w.out <= (1 << 30) && w.out * (w.in / kBlock) < (int64_t(1) << 31), op, "out", w.out, "is too large");
  require(type != Type::kFloat32, op, "dtype", static_cast<int>(type), "must be float16 or bfloat16");
  require_nf4(w, op);
  require_aligned(x, 16, op, "x");
  require_aligned(y, 2, op, "y");
  Nf4Gemv p = {};
  p.code_map = w.code_map;
  p.nested_map = w.nested_absmax == nullptr ? nullptr : w.nested_map;
  p.parts = 1;
  p.blocks = uint32_t(w.in / kBlock);
  p.units = uint32_t((w.out + kTile - 1) / kTile);
  p.y_width = uint32_t(w.out);
  p.segment[0] = {w.codes, w.absmax, w.nested_absmax, bias, w.offset, uint32_t(w.out), p.units, 0, w.tiled};
  const DeviceGuard guard(device, op);
  if (type == Type::kFloat16) return launch_rows<__half>(p, x, y, rows, device, stream);
  launch_rows<__nv_bfloat16>(p, x, y, rows, device, stream);
}

}  // namespace localq
