#include "product.h"

#include "amx.h"
#include "buffer.h"

namespace illm {
namespace {

// How far on from a panel lies what is fetched during it, in elements; 0 for nothing.
template <class T>
int64_t distance(const T* panel, const void* next) {
  return next ? static_cast<const T*>(next) - panel : 0;
}

template <class T>
void multiply_block(const float* a, int stride, int num_rows, const T* panel, int num_in,
                    const void* next, float* c) {
  for (int row = 0; row < num_rows; row += kRowsPerProduct) {
    const int n = std::min(kRowsPerProduct, num_rows - row);
    with_constant<kRowsPerProduct>(n, [&](auto count) {
      Vec sums[count][2] = {};
      const int64_t ahead = row == 0 ? distance(panel, next) : 0;
      multiply<count>(a + row * stride, stride, panel, kPanel, num_in, ahead, sums);
      for (int i = 0; i < n; ++i) {
        store(c + (row + i) * kPanel, sums[i][0]);
        store(c + (row + i) * kPanel + kLanes, sums[i][1]);
      }
    });
  }
}

thread_local Buffer expanded;  // the panel at hand

}  // namespace

Multiplier::Multiplier(const Input& input, int num_rows, const Matrix& matrix)
    : input_(input), num_rows_(num_rows), matrix_(matrix) {
#if ILLM_HAS_AMX
  if (matrix.is_tiles()) configure_tiles();
#endif
  if (matrix.is_blocks()) expanded_ = expanded.take<Brain>(int64_t(matrix.num_in) * kPanel);
}

Multiplier::~Multiplier() {
#if ILLM_HAS_AMX
  if (matrix_.is_tiles()) release_tiles();
#endif
}

void Multiplier::multiply(int row, int p, const void* next, float* c) const {
  if (matrix_.is_tiles()) return multiply_tiled(row, p, next, c);
  const int n = std::min(kRowsPerBlock, num_rows_ - row);
  const void* panel = matrix_.panel(p);
  const auto block = [&](auto* weights) {
    multiply_block(input_.row<float>(row), input_.stride, n, weights, matrix_.num_in, next, c);
  };
  switch (matrix_.format) {
    case kFloat: return block(static_cast<const float*>(panel));
    case kHalf: return block(static_cast<const Half*>(panel));
    case kBrain: return block(static_cast<const Brain*>(panel));
    default:
      if (row == 0)
        for (int i = 0; i < matrix_.num_in / kBlock; ++i) expand(p, i, next);
      next = nullptr;  // fetched already
      return block(static_cast<const Brain*>(expanded_));
  }
}

void Multiplier::multiply_tiled(int row, int p, const void* next, float* c) const {
#if ILLM_HAS_AMX
  const Brain* a = input_.row<Brain>(row);
  const int depth = round_up(matrix_.num_in, kTileDepth);
  const auto block = [&](auto row_tiles) {
    if (matrix_.is_blocks() && row == 0) {
      const auto pair_at = [&](int i) { return expand(p, i, next); };
      return multiply_tiles<row_tiles>(a, pair_at, depth, c, kPanel);
    }
    const auto* panel =
        matrix_.is_blocks() ? expanded_ : static_cast<const Brain*>(matrix_.panel(p));
    multiply_tiles<row_tiles>(a, panel, depth, distance(panel, next), c, kPanel);
  };
  with_constant<kRowsPerBlock / kTileRows>((num_rows_ - row + kTileRows - 1) / kTileRows, block);
#endif
}

const Brain* Multiplier::expand(int p, int block, const void* next) const {
  const int bytes = matrix_.blocks().panel_bytes();
  if (next) prefetch(static_cast<const char*>(next) + block * bytes, bytes);
  const auto* from = static_cast<const uint8_t*>(matrix_.panel(p)) + block * bytes;
  Brain* to = expanded_ + int64_t(block) * kBlock * kPanel;
  expand_block((Format)matrix_.format, from, to);
  return to;
}

}  // namespace illm
