// Activations times weights. Each output is one sum over the inputs in a fixed order: neither the
// other rows nor the number of threads change a bit of it.
#pragma once

#include <algorithm>

#include "matrix.h"

namespace illm {

constexpr int kRowsPerBlock = 32;

// Rows of float; or, where the weights are tiles, of bfloat16 in tiles: [rows / 16][depth / 32][16][32],
// filled up with zeros.
struct Input {
  const void* data;
  int stride;  // elements between rows of float; between rows of tiles, over 16

  template <class T>
  const T* row(int64_t i) const {
    return static_cast<const T*>(data) + i * stride;
  }
};

// Multiplies blocks of rows with panels; one for each thread of a product.
class Multiplier {
 public:
  Multiplier(const Input& input, int num_rows, const Matrix& matrix);
  ~Multiplier();
  Multiplier(const Multiplier&) = delete;

  // c[up to kRowsPerBlock, kPanel] = the rows from `row` on times panel p. Meanwhile what lies at
  // `next` is brought near, as much as a panel takes, if anything. Row 0 of a panel comes first: it
  // expands what lies in blocks.
  void multiply(int row, int p, const void* next, float* c) const;

 private:
  void multiply_tiled(int row, int p, const void* next, float* c) const;

  // Expands a block of panel p, and says where it is now.
  const Brain* expand(int p, int block, const void* next) const;

  const Input& input_;
  const int num_rows_;
  const Matrix& matrix_;
  Brain* expanded_ = nullptr;
};

// Calls put(row, column, a, b) with the kPanel outputs from each column on. Each thread reads a
// share of the panels in order; during its last ones it fetches where its share of the product that
// comes next begins, if one does, so that memory is not idle between the two.
template <class Put>
void multiply_rows(ThreadPool& threads, const Input& input, int num_rows, const Matrix& matrix,
                   const Matrix* next_matrix, const Put& put) {
  const int panels = matrix.num_panels();
  threads.share_out(panels, [&](Share share) {
    const Multiplier multiplier(input, num_rows, matrix);
    alignas(kCacheLine) float c[kRowsPerBlock * kPanel];
    const auto after = [&](int p) -> const void* {
      if (p + 1 != share.end_of(panels)) return p + 1 < panels ? matrix.panel(p + 1) : nullptr;
      return next_matrix ? next_matrix->panel(share.begin_of(next_matrix->num_panels())) : nullptr;
    };
    for (int p; share.take(p);) {
      for (int row = 0; row < num_rows; row += kRowsPerBlock) {
        multiplier.multiply(row, p, row == 0 ? after(p) : nullptr, c);
        for (int j = 0; j < std::min(kRowsPerBlock, num_rows - row); ++j)
          put(row + j, p * kPanel, load(c + j * kPanel), load(c + j * kPanel + kLanes));
      }
    }
  });
}

}  // namespace illm
