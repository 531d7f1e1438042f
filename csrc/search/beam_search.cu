// Beam search for codes on a GPU (beam_search.h): a beam of paths along every row of a block of columns.
//   An event extends each path by all 256 codewords of a book; cost = paid + |rest - whitened codeword|^2. The `beam`
//   lowest costs remain, in ascending order; equal ones by path, then code. f32; deterministic.
//
// A block of threads has one row, and one warp per 16 paths, so that barriers are cheap for rows of few paths. Per
// event (beam_search_kernel.cuh, `choose`):
//   scan       a lane holds 8 codewords of the event's table in registers, (step + 1) * 8 floats, and goes over the
//              paths of its warp: 8 * step products per path, with only the rest and its square from shared memory
//   threshold  the `beam`th lowest of the lowest costs of all threads (two threads per path: half of them): a bitonic
//              sort in every warp, then ranks between warps. At least `beam` candidates are not above it, and about 1.4
//              beam if they are spread evenly; paths prefer the same codewords, so lanes exchange their minima
//   collect    the products again, only for paths that have a candidate below it (half of them); ballots order these.
//              If they exceed the space, the threshold is bisected over cost, path and code
//   rank       every candidate counts those below it, which is its position
// and for the chosen paths (paths.cuh, `take`), with two threads each: the whitened error is the rest minus the table's
// column; tails are copied and extended; of the history only one byte per position is copied, the index of the
// ancestor. Errors stay where they were computed, [positions, beam, step], and are read through it.
//
// Bound: instructions; README.md has the counts. Needs step 2, 4, 8 or 16, at most 256 paths, and search_plan().bytes
// of shared memory. NaN operands give meaningless codes, but no access outside the arrays.
#include "common/check.h"
#include "common/launch.h"
#include "search/beam_search_kernel.cuh"

namespace localq {
namespace {

constexpr const char* kOp = "vq_search";
constexpr int kMostWarps = kMostSearchBeam / kSearchPathsPerWarp;

template <int kStep>
__global__ void __launch_bounds__(32 * kMostWarps, 1) vq_search_kernel(const __grid_constant__ Search search) {
  extern __shared__ float4 shared[];
  release_dependents();
  dependency_wait();
  RowSearch<kStep>(search, reinterpret_cast<char*>(shared), blockIdx.x).run();
}

// Events by value, checked here: the kernel does not check them.
void schedule(Search& search) {
  const SearchBlock& block = search.block;
  require(block.events <= kMostSearchEvents, kOp, "events", block.events, "must be at most 1024");
  int positions = 0;
  for (int i = 0; i < block.events; ++i) {
    const SearchEvent& event = block.event[i];
    require(event.book >= 0 && event.book < block.books, kOp, "an event's book", event.book,
            "must be a book of the block");
    search.event[i] = uint8_t(event.book | (event.last ? kLastEvent : 0));
    positions += event.last;
  }
  require(positions == search.positions, kOp, "last events", positions, "must be one per step");
  require(block.event[block.events - 1].last, kOp, "events", block.events,
          "must end with the last event of a position");
}

void check(const SearchBlock& block) {
  require(block.rows <= INT32_MAX, kOp, "rows", block.rows, "must be less than 2^31");
  for (int i = 0; i < block.books; ++i) {
    const int length = block.length[i];
    require(length >= block.step && length <= kMostSearchTail && length % block.step == 0, kOp, "a codeword's length",
            length, "must be a multiple of the step, at most 32");
    require_aligned(block.book[i], 16, kOp, "a book");
  }
  require_aligned(block.feedback, 16, kOp, "feedback");
  require_aligned(block.white, 16, kOp, "white");
  require_aligned(block.tables, 16, kOp, "tables");
  for (const float* each :
       {block.targets, static_cast<const float*>(block.tails), static_cast<const float*>(block.errors)}) {
    require_aligned(each, 4, kOp, "targets, tails or errors");
  }
}

}  // namespace

void vq_search(const SearchBlock& block, int device, cudaStream_t stream) {
  check(block);
  Search search = search_plan(block);
  schedule(search);
  const DeviceGuard guard(device, kOp);
  const int room = device_facts(device, kOp).shared_bytes_per_block;
  require(search.bytes <= room, kOp, "bytes of shared memory", search.bytes,
          "exceeds the shared memory of this GPU: use a narrower block or beam");
  const dim3 grid(unsigned(block.rows)), threads(32 * search.warps);
  const auto go = [&](auto kernel) { launch(kOp, device, kernel, grid, threads, search.bytes, stream, search); };
  switch (block.step) {
    case 2:
      return go(vq_search_kernel<2>);
    case 4:
      return go(vq_search_kernel<4>);
    case 8:
      return go(vq_search_kernel<8>);
    case 16:
      return go(vq_search_kernel<16>);
    default:
      require(false, kOp, "step", block.step, "must be 2, 4, 8 or 16");
  }
}

}  // namespace localq
