// Beam search for codes on the CPU (beam_search.h): the reference of the GPU version, and fast enough for small models.
//
// Per event and path: the 256 squared distances (vectorized by the compiler), of which only those below the worst path
// so far are examined. The lowest of every 16 distances is computed on the way and skips most of them.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "common/require.h"
#include "search/beam_search.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define LOCALQ_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define LOCALQ_CLONES
#endif

namespace localq {
namespace {

constexpr int kLanes = 16;
constexpr int kStripe = kSearchEntries / kLanes;

// distance[k] = base + tables' squares - 2 <residual, codeword k>; lowest[j] over all k with k % kLanes == j.
LOCALQ_CLONES void distances(const float* __restrict table, const float* __restrict residual, int step, float base,
                             float* __restrict distance, float* __restrict lowest) {
  const float* squares = table + step * kSearchEntries;
  for (int k = 0; k < kSearchEntries; ++k) distance[k] = base + squares[k];
  for (int i = 0; i < step; ++i) {
    const float twice = -2.f * residual[i];
    for (int k = 0; k < kSearchEntries; ++k) distance[k] += twice * table[i * kSearchEntries + k];
  }
  for (int j = 0; j < kLanes; ++j) lowest[j] = distance[j];
  for (int i = 1; i < kStripe; ++i) {
    for (int j = 0; j < kLanes; ++j) lowest[j] = std::min(lowest[j], distance[i * kLanes + j]);
  }
}

// out[j] = target[j] - sum over i < count of error[i] * feedback[i][j], j < step; feedback has row stride `stride`.
LOCALQ_CLONES void fed_back(const float* __restrict target, const float* __restrict error,
                            const float* __restrict feedback, int count, int stride, int step, float* __restrict out) {
  float sum[kMostSearchStep][kLanes] = {};
  for (int j = 0; j < step; ++j) {
    const float* column = feedback + int64_t(j) * stride;
    for (int i = 0; i < count; i += kLanes) {  // both are padded with zeros
      for (int lane = 0; lane < kLanes; ++lane) sum[j][lane] += error[i + lane] * column[i + lane];
    }
  }
  for (int j = 0; j < step; ++j) {
    float total = 0.f;
    for (int lane = 0; lane < kLanes; ++lane) total += sum[j][lane];
    out[j] = target[j] - total;
  }
}

struct Choice {
  float cost;
  int path, code;
};

// The `beam` lowest costs so far, ascending; of equal ones the first found stays.
struct Best {
  std::vector<Choice> kept;
  int beam, count = 0;
  explicit Best(int beam) : kept(beam + 1), beam(beam) {
  }
  float worst() const {
    return count < beam ? std::numeric_limits<float>::infinity() : kept[count - 1].cost;
  }
  void offer(Choice choice) {
    int at = count < beam ? count++ : count - 1;
    for (; at > 0 && kept[at - 1].cost > choice.cost; --at) kept[at] = kept[at - 1];
    kept[at] = choice;
  }
};

// A path of a row; `error` and `codes` have the length of the block.
struct Path {
  float cost;
  float tail[kMostSearchTail], target[kMostSearchStep], residual[kMostSearchStep];
};

class RowSearch {
 public:
  RowSearch(const SearchBlock& block, const float* columns)
      : b_(block),
        columns_(columns),
        width_((block.columns + kLanes - 1) / kLanes * kLanes),
        best_(block.beam),
        paths_(block.beam),
        next_(block.beam),
        errors_(size_t(block.beam) * width_),
        next_errors_(errors_.size()),
        codes_(size_t(block.beam) * block.events),
        next_codes_(codes_.size()) {
  }

  void run(int64_t row) {
    count_ = 1;
    paths_[0] = {};
    std::copy_n(b_.tails + row * b_.tail, b_.tail, paths_[0].tail);
    std::fill_n(errors_.begin(), width_, 0.f);
    int column = 0;
    bool fresh = true;
    for (int event = 0; event < b_.events; ++event) {
      if (fresh) open(b_.targets + row * b_.columns, column);
      choose(event, column);
      take(event, column);
      fresh = b_.event[event].last;
      if (fresh) column += b_.step;
    }
    std::copy_n(paths_[0].tail, b_.tail, b_.tails + row * b_.tail);
    std::copy_n(errors_.begin(), b_.columns, b_.errors + row * b_.columns);
    std::copy_n(codes_.begin(), b_.events, b_.codes + row * b_.events);
  }

 private:
  // Computes the target of this position for each path.
  void open(const float* targets, int column) {
    const int count = (column + kLanes - 1) / kLanes * kLanes;
    for (int p = 0; p < count_; ++p) {
      fed_back(targets + column, &errors_[size_t(p) * width_], columns_ + int64_t(column) * width_, count, width_,
               b_.step, paths_[p].target);
    }
  }

  void whiten(Path& path, int column) const {
    const float* white = b_.white + int64_t(column) * b_.step;
    for (int j = 0; j < b_.step; ++j) {
      path.residual[j] = 0.f;
      for (int i = 0; i < b_.step; ++i) {
        path.residual[j] += (path.target[i] - path.tail[i]) * white[i * b_.step + j];
      }
    }
  }

  void choose(int event, int column) {
    best_.count = 0;
    alignas(64) float distance[kSearchEntries], lowest[kLanes];
    const float* table = b_.tables + int64_t(event) * (b_.step + 1) * kSearchEntries;
    for (int p = 0; p < count_; ++p) {
      Path& path = paths_[p];
      whiten(path, column);
      float base = path.cost;
      for (int i = 0; i < b_.step; ++i) base += path.residual[i] * path.residual[i];
      distances(table, path.residual, b_.step, base, distance, lowest);
      for (int j = 0; j < kLanes; ++j) {
        if (lowest[j] >= best_.worst()) continue;
        for (int k = j; k < kSearchEntries; k += kLanes) {
          if (distance[k] < best_.worst()) best_.offer({distance[k], p, k});
        }
      }
    }
  }

  // The chosen paths replace their parents.
  void take(int event, int column) {
    const int book = b_.event[event].book, length = b_.length[book];
    const bool last = b_.event[event].last;
    for (int p = 0; p < best_.count; ++p) {
      const Choice& choice = best_.kept[p];
      Path& path = next_[p];
      path = paths_[choice.path];
      const float* codeword = b_.book[book] + int64_t(choice.code) * length;
      for (int i = 0; i < length; ++i) path.tail[i] += codeword[i];
      float* error = &next_errors_[size_t(p) * width_];
      std::copy_n(&errors_[size_t(choice.path) * width_], width_, error);
      uint8_t* codes = &next_codes_[size_t(p) * b_.events];
      std::copy_n(&codes_[size_t(choice.path) * b_.events], event, codes);
      codes[event] = uint8_t(choice.code);
      if (!last) continue;
      whiten(path, column);
      for (int i = 0; i < b_.step; ++i) path.cost += path.residual[i] * path.residual[i];
      std::copy_n(path.residual, b_.step, error + column);
      std::copy(path.tail + b_.step, path.tail + kMostSearchTail, path.tail);
      std::fill_n(path.tail + kMostSearchTail - b_.step, b_.step, 0.f);
    }
    count_ = best_.count;
    paths_.swap(next_);
    errors_.swap(next_errors_);
    codes_.swap(next_codes_);
  }

  const SearchBlock& b_;
  const float* columns_;  // feedback, transposed and padded: [columns, width]
  int width_, count_ = 0;
  Best best_;
  std::vector<Path> paths_, next_;
  std::vector<float> errors_, next_errors_;
  std::vector<uint8_t> codes_, next_codes_;
};

// Column j of the feedback as a row of `width`; zero where it is not read.
std::vector<float> transposed(const SearchBlock& b) {
  const int width = (b.columns + kLanes - 1) / kLanes * kLanes;
  std::vector<float> columns(size_t(b.columns) * width, 0.f);
  for (int j = 0; j < b.columns; ++j) {
    for (int i = 0; i < j / b.step * b.step; ++i)
      columns[size_t(j) * width + i] = b.feedback[int64_t(i) * b.columns + j];
  }
  return columns;
}

}  // namespace

SearchBlock search_block(int64_t rows, int columns, int step, int tail, int beam, int events, int books) {
  const char* op = "vq_search";
  require(rows >= 1, op, "rows", rows, "must be positive");
  require(step >= 1 && step <= kMostSearchStep, op, "step", step, "must be from 1 to 16");
  require(columns >= step && columns % step == 0, op, "columns", columns, "must be a positive multiple of the step");
  require(tail >= step && tail <= kMostSearchTail, op, "tail", tail, "must be from step to 32");
  require(beam >= 1 && beam <= kMostSearchBeam, op, "beam", beam, "must be from 1 to 256");
  require(books >= 1 && books <= kMostSearchBooks, op, "books", books, "must be from 1 to 4");
  require(events >= columns / step, op, "events", events, "must be at least one per step");
  SearchBlock block = {};
  block.rows = rows;
  block.columns = columns, block.step = step, block.tail = tail;
  block.beam = beam, block.events = events, block.books = books;
  return block;
}

void vq_search_host(const SearchBlock& block, int threads) {
  const std::vector<float> columns = transposed(block);
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    RowSearch search(block, columns.data());
    for (int64_t row; (row = next++) < block.rows;) search.run(row);
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();
}

}  // namespace localq
