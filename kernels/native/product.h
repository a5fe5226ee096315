// Activations times weights. Each output is one sum over the inputs in a fixed order: neither the
// other rows nor the number of threads change a bit of it.
#pragma once

#include <algorithm>

#include "matrix.h"

namespace illm {

constexpr int kRowsPerBlock = 32;
constexpr int kRunsPerThread = 4;  // so that nobody waits long for a thread that was held up

// Rows of float; or of bfloat16 where the weights are tiles: then a whole number of tiles, the
// columns filled up with zeros.
struct Input {
  const void* data;
  int stride;  // elements

  template <class T>
  const T* row(int64_t i) const {
    return static_cast<const T*>(data) + i * stride;
  }
};

// Multiplies blocks of rows with panels; one for each run of panels of one thread.
class Multiplier {
 public:
  Multiplier(const Input& input, int num_rows, const Matrix& matrix);
  ~Multiplier();
  Multiplier(const Multiplier&) = delete;

  // c[up to kRowsPerBlock, kPanel] = the rows from `row` on times panel p. The first block of rows
  // brings the panel from memory for those that follow.
  void multiply(int row, int p, float* c) const;

 private:
  const Input& input_;
  const int num_rows_;
  const Matrix& matrix_;
};

// Calls put(row, column, a, b) with the kPanel outputs from each column on. Threads take runs of
// panels, so that memory is read in order.
template <class Put>
void multiply_rows(ThreadPool& threads, const Input& input, int num_rows, const Matrix& matrix,
                   const Put& put) {
  const int panels = matrix.num_panels();
  const int runs = std::min(panels, threads.num_threads() * kRunsPerThread);
  threads.run(runs, [&](int i) {
    const Multiplier multiplier(input, num_rows, matrix);
    alignas(kCacheLine) float c[kRowsPerBlock * kPanel];
    for (int p = panels * i / runs; p < panels * (i + 1) / runs; ++p) {
      for (int row = 0; row < num_rows; row += kRowsPerBlock) {
        multiplier.multiply(row, p, c);
        for (int j = 0; j < std::min(kRowsPerBlock, num_rows - row); ++j)
          put(row + j, p * kPanel, load(c + j * kPanel), load(c + j * kPanel + kLanes));
      }
    }
  });
}

}  // namespace illm
