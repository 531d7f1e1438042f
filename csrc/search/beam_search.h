// Beam search for codes of additive codebooks: beams of paths along the rows of a matrix. Used by localq/quantize.
#pragma once

#include <cstdint>

struct CUstream_st;  // *cudaStream_t; the CPU search needs no CUDA headers

namespace localq {

constexpr int kSearchEntries = 256;  // codewords per book
constexpr int kMostSearchBooks = 4;
constexpr int kMostSearchStep = 16;   // weights between two positions
constexpr int kMostSearchTail = 32;   // weights per codeword
constexpr int kMostSearchBeam = 256;  // paths per row

// One use of a book: which book, and whether it is the last at its position, after which `step` weights are final.
struct SearchEvent {
  int book;
  bool last;
};

// A block of columns of all rows. Rows are independent; all f32, row-major.
//   targets   [rows, columns]  the weights, minus the feedback of whitened errors of earlier blocks
//   feedback  [columns, columns]  [i, j] is read if i's position precedes j's: the part of error i subtracted from j
//   white     [positions, step, step]  the triangle that whitens the error of a position
//   events    [events] in order; tables [events, step + 1, 256]: the whitened first `step` weights of every codeword of
//             the event's book, component by component, and last the sum of their squares
//   books     [books] -> [256, lengths[book]]; lengths % step == 0
//   tails     [rows, tail]     on entry what codewords of earlier blocks add to this one, on return to the next
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

// A block of these sizes without pointers; throws std::invalid_argument for sizes that the searches do not support.
SearchBlock search_block(int64_t rows, int columns, int step, int tail, int beam, int events, int books);

// On the CPU, with `threads` threads. Paths stay in ascending order of cost; of equal ones the first found stays.
void vq_search_host(const SearchBlock& block, int threads);

// On a GPU. Only `event` is in host memory; it is read before the function returns. step 2, 4, 8 or 16; at most 1024
// events; the errors of all paths of a row must fit into shared memory: about (5 columns + 200) * beam bytes. books,
// feedback, white and tables are 16-byte aligned. Paths stay in ascending order of cost, equal ones by path, then code.
void vq_search(const SearchBlock& block, int device, CUstream_st* stream);

}  // namespace localq
