// W = scale * sums of codewords, rows of a matrix whose codes lie in tiles of 16 rows (localq/quant/vq_tiles.py), bit
// for bit as localq/quant/vq2_codec.py and aqlm.py define it, to f16 or bf16.
//   book    one or two (dequantize.h): codes u8 [tile][position][16 rows], codebook C [entries, length]
//   scales  C [out], C the type of the codebooks
//   out     O [row_count, in]; in % 8 == 0
// Terms are added in f32 in the order of the definition: the first book, earlier positions first, then the second. -0
// in a codebook is +0 here, so that the first term needs no sum with zero: no other sum can tell.
//
// A weight takes length / stride halves out of shared memory whatever the order of work; so what counts is that no bank
// is asked twice. Every codeword is there 8 times in parts of 16 bytes, one copy for each group of four banks: the 8
// lanes of a phase have a copy each. A lane makes 8 neighbouring weights of a row, and so writes 16 bytes, its warp 512
// behind each other; it has the codes of 16 rows at each of its positions from one load of 16 bytes, and one PRMT makes
// an address: the code is its second byte, the lane's copy the first. Positions before the first of a row have code 0
// and bit 16 set: zeros lie there.
//
// Bound: memory, 1 / stride bytes per book and 2 bytes per weight; on an H200 shared memory nearly as much (README.md).
// Other strides and lengths, f32, and books that do not fit into shared memory: additive_dequantize.cu.
#include "common/check.h"
#include "common/launch.h"
#include "lookup/additive.h"
#include "lookup/dequantize.h"
#include "lookup/dequantize_kernel.cuh"

namespace localq {
namespace {

using namespace tiled;
constexpr const char* kOp = "vq_dequantize";

struct Launch {
  const TiledMatrix& w;
  void* out;
  int64_t row_begin, row_count;
  int device;
  cudaStream_t stream;
};

// Whether there is a kernel for books of these sizes and these types; then it is launched.
template <typename First, typename Second>
bool fits(const TiledMatrix& w, int device) {
  const bool first = w.book[0].stride == First::kStride && w.book[0].length == First::kLength;
  const bool second = w.book[1].stride == Second::kStride && w.book[1].length == Second::kLength;
  return first && second && int(shared_bytes<First, Second>()) <= device_facts(device, kOp).shared_bytes_per_block;
}

template <typename First, typename Second, typename C, typename O, bool kRounded>
void start(const Launch& l) {
  Arguments p = {};
  for (int i = 0; i < l.w.books; ++i) {
    const TiledBook& book = l.w.book[i];
    p.book[i] = {book.codes, static_cast<const uint32_t*>(book.codebook), uint32_t(book.before),
                 uint32_t(book.tile_positions * kTile), uint32_t(book.entries)};
  }
  p.scales = static_cast<const C*>(l.w.scales) + l.row_begin;
  p.rows = uint32_t(l.row_count), p.in = uint32_t(l.w.in), p.runs = p.in / kRun, p.chunks = (p.runs + 31) / 32;
  p.first_tile = uint32_t(l.row_begin / kTile);
  const int64_t items = (l.row_count + kTile - 1) / kTile * p.chunks;
  require(items < int64_t(1) << 30, kOp, "row_count", l.row_count, "is too large for one launch");
  p.items = uint32_t(items);
  constexpr uint32_t kWarps = threads<First, Second>() / 32;
  const uint32_t blocks = (p.items + kWarps - 1) / kWarps, most = device_facts(l.device, kOp).multiprocessors;
  launch(kOp, l.device, vq_dequantize_kernel<First, Second, C, O, kRounded>, dim3(blocks < most ? blocks : most),
         dim3(32 * kWarps), shared_bytes<First, Second>(), l.stream, p, static_cast<O*>(l.out));
}

template <typename First, typename Second>
bool start_vq2(const Launch& l, Type stored, Type type) {
  if (l.w.rounded || stored != Type::kFloat16 || !fits<First, Second>(l.w, l.device)) return false;
  if (type == Type::kFloat16) {
    start<First, Second, __half, __half, false>(l);
  } else {
    start<First, Second, __half, __nv_bfloat16, false>(l);
  }
  return true;
}

template <typename First, typename Second>
bool start_aqlm(const Launch& l, Type stored, Type type) {
  if (!l.w.rounded || stored != type || !fits<First, Second>(l.w, l.device)) return false;
  if (type == Type::kFloat16) {
    start<First, Second, __half, __half, true>(l);
  } else {
    start<First, Second, __nv_bfloat16, __nv_bfloat16, true>(l);
  }
  return true;
}

bool started(const Launch& l, Type stored, Type type) {
  if (type == Type::kFloat32) return false;
  return start_vq2<Book<4, 16>, None>(l, stored, type) || start_vq2<Book<4, 16>, Book<16, 16>>(l, stored, type) ||
         start_vq2<Book<4, 16>, Book<8, 16>>(l, stored, type) || start_vq2<Book<4, 16>, Book<4, 16>>(l, stored, type) ||
         start_vq2<Book<8, 8>, None>(l, stored, type) || start_vq2<Book<8, 8>, Book<8, 8>>(l, stored, type) ||
         start_aqlm<Book<8, 8>, None>(l, stored, type) || start_aqlm<Book<8, 8>, Book<8, 8>>(l, stored, type);
}

void check_book(const TiledBook& book, const TiledMatrix& w) {
  const bool known = book.stride == 2 || book.stride == 4 || book.stride == 8 || book.stride == 16;
  require(known && w.in % book.stride == 0, kOp, "stride", book.stride, "must be 2, 4, 8 or 16 and divide in");
  require(book.length >= book.stride && book.length <= 32 && book.length % book.stride == 0, kOp, "length", book.length,
          "must be a multiple of the stride, at most 32");
  require(book.entries >= 2 && book.entries <= 256 && (book.entries & (book.entries - 1)) == 0, kOp, "entries",
          book.entries, "must be a power of two from 2 to 256");
  const int64_t room = book.tile_positions - w.in / book.stride;
  require(book.before >= 0 && book.before <= room, kOp, "before", book.before, "must leave room for the positions");
  require(book.tile_positions <= 1 << 24, kOp, "tile_positions", book.tile_positions, "is too large");
  require_aligned(book.codes, 16, kOp, "codes");
  require_aligned(book.codebook, 16, kOp, "codebook");
}

void start_any(const Launch& l, Type stored, Type type) {
  Additive any = {{}, l.w.books, l.w.scales, l.w.out, l.w.in, 1, l.w.rounded};
  for (int i = 0; i < l.w.books; ++i) {
    const TiledBook& book = l.w.book[i];
    any.set[i] = {book.codes,  book.codebook, 1,           book.entries,       book.length,
                  book.stride, false,         book.before, book.tile_positions};
  }
  additive_dequantize(any, stored, l.out, type, l.row_begin, l.row_count, l.device, l.stream);
}

}  // namespace

void vq_dequantize(const TiledMatrix& w, Type stored, void* out, Type type, int64_t row_begin, int64_t row_count,
                   int device, cudaStream_t stream) {
  require(w.books == 1 || w.books == 2, kOp, "books", w.books, "must be 1 or 2");
  require(w.in >= 8 && w.in % 8 == 0 && w.in <= 1 << 24, kOp, "in", w.in, "must be a multiple of 8, at most 2^24");
  require(w.out >= 1 && w.out < int64_t(1) << 31, kOp, "out", w.out, "must be positive and not larger");
  require(row_begin >= 0 && row_begin < w.out, kOp, "row_begin", row_begin, "must be a row of the matrix");
  require(row_begin % kTile == 0, kOp, "row_begin", row_begin, "cuts a tile of 16 rows");
  require(row_count >= 1 && row_count <= w.out - row_begin, kOp, "row_count", row_count, "must be rows that are there");
  require_aligned(w.scales, 2, kOp, "scales");
  require_aligned(out, 16, kOp, "out");
  for (int i = 0; i < w.books; ++i) check_book(w.book[i], w);
  const DeviceGuard guard(device, kOp);
  const Launch l = {w, out, row_begin, row_count, device, stream};
  if (!started(l, stored, type)) start_any(l, stored, type);
}

}  // namespace localq
