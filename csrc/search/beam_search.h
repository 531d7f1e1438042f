// The search for codes of additive codebooks (localq/quantizer): beams of paths along the rows of a matrix.
#pragma once

#include <cstdint>

struct CUstream_st;  // *cudaStream_t: the search on the CPU needs no headers of CUDA

namespace localq {

constexpr int kSearchEntries = 256;  // codewords of a book
constexpr int kMostSearchBooks = 4;
constexpr int kMostSearchStep = 16;   // weights between two positions
constexpr int kMostSearchTail = 32;   // weights of a codeword
constexpr int kMostSearchBeam = 256;  // paths of a row

// One look at one book: which book, and whether it is the last at its position, so that `step` weights are final.
struct SearchEvent {
  int book;
  bool last;
};

// A block of columns of all rows. Every row is searched on its own; f32 all through, [..] row-major.
//   targets   [rows, columns]  the weights, less what whitened errors of earlier blocks feed back
//   feedback  [columns, columns]  of it [i, j] is read where i's position lies before j's: error i takes so much of j
//   white     [positions, step, step]  the triangle that whitens the error of a position
//   events    [events] in order; tables [events, step + 1, 256]: the whitened first `step` weights of every codeword of
//             the event's book, component by component, and last their squares' sum
//   books     [books] -> [256, lengths[book]]; lengths % step == 0
//   tails     [rows, tail]     what codewords of earlier blocks add to this one, and on return to the next
//   codes     u8 [rows, events]  out
//   errors    [rows, columns]  out: whitened errors
struct SearchBlock {
  int64_t rows;
  int columns, step, events, books, tail, beam;
  const float *targets, *feedback, *white, *tables;
  const SearchEvent* event;
  const float* book[kMostSearchBooks];
  int length[kMostSearchBooks];
  float* tails;
  uint8_t* codes;
  float* errors;
};

// A block of these sizes without pointers; throws std::invalid_argument for sizes that the searches do not take.
SearchBlock search_block(int64_t rows, int columns, int step, int tail, int beam, int events, int books);

// On the CPU, with so many threads. Paths are kept in ascending order of cost; of equal ones the first found stays.
void vq_search_host(const SearchBlock& block, int threads);

// On a GPU: `event` alone is in host memory, and read before this returns. step 2, 4, 8 or 16; at most 1024 events; the
// errors of all paths of a row must fit into shared memory: about (5 columns + 200) * beam bytes. books, feedback,
// white and tables are 16-byte aligned. Paths stay in ascending order of cost, equal ones in that of path, then code.
void vq_search(const SearchBlock& block, int device, CUstream_st* stream);

}  // namespace localq
