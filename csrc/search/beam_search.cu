// The search for codes on a GPU (beam_search.h): a beam of paths along every row of a block of columns.
//   an event continues each path with all 256 codewords of a book; cost = paid + |rest - whitened codeword|^2; the
//   `beam` lowest stay, in ascending order: equal ones in that of path, then code. f32, the same bits run after run.
//
// A block of threads has one row and a warp for every 16 paths, so that rows of few paths meet at cheap barriers. Per
// event (beam_search_kernel.cuh, `choose`):
//   scan       a lane holds 8 codewords of the event's table in registers, (step + 1) * 8 floats, and goes over the
//              paths of its warp: 8 * step products a path, nothing but the rest and its square from shared memory
//   threshold  the `beam`th lowest of the lowest costs of all threads (two threads a path: half of them): a bitonic
//              sort in every warp, then ranks between warps. No fewer than `beam` candidates are below it, and no more
//              than 1.4 beam where they spread; paths want the same codewords, so lanes swap what they saw
//   collect    the products once more, of those paths alone that have a candidate below it (half of them); ballots put
//              these in order. Too many for the room there is: the threshold is bisected over cost, path and code
//   rank       every candidate counts those below it, which is its place
// and for the paths that were chosen (paths.cuh, `take`), two threads each: the whitened error is the rest
// less the table's column; tails are copied and added to; of the history nothing is copied but one byte a position:
// which path was the ancestor. Errors lie where they were made, [positions, beam, step], and are read through it.
//
// Bound: instructions. csrc/README.md, "The search for codes", has the counts.
// Needs step 2, 4, 8 or 16, at most 256 paths, and search_plan().bytes of shared memory. NaN among the operands ends in
// codes without meaning, never outside of the arrays.
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

// Events by value, checked: the kernel follows them without looking.
void schedule(Search& search) {
  const SearchBlock& block = search.block;
  require(block.events <= kMostSearchEvents, kOp, "events", block.events, "must be at most 1024");
  int positions = 0;
  for (int i = 0; i < block.events; ++i) {
    const SearchEvent& event = block.event[i];
    require(event.book >= 0 && event.book < block.books, kOp, "an event's book", event.book, "is not there");
    search.event[i] = uint8_t(event.book | (event.last ? kLastEvent : 0));
    positions += event.last;
  }
  require(positions == search.positions, kOp, "last events", positions, "must be one for each step");
  require(block.event[block.events - 1].last, kOp, "events", block.events, "must end with a last one");
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
          "is more than this GPU has for a row: a narrower block or beam needs less");
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
