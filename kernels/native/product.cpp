#include "product.h"

#include "amx.h"

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

#if ILLM_HAS_AMX
void multiply_block_of_tiles(const Brain* a, int num_rows, const Brain* panel,
                             int num_in, const void* next, float* c) {
  const int depth = round_up(num_in, kTileDepth);
  const int64_t ahead = distance(panel, next);
  if (num_rows > kTileRows) {
    multiply_tiles<2>(a, panel, depth, ahead, c, kPanel);
  } else {
    multiply_tiles<1>(a, panel, depth, ahead, c, kPanel);
  }
}
#endif

}  // namespace

Multiplier::Multiplier(const Input& input, int num_rows, const Matrix& matrix)
    : input_(input), num_rows_(num_rows), matrix_(matrix) {
#if ILLM_HAS_AMX
  if (matrix.format == kBrainTiles) configure_tiles();
#endif
}

Multiplier::~Multiplier() {
#if ILLM_HAS_AMX
  if (matrix_.format == kBrainTiles) release_tiles();
#endif
}

void Multiplier::multiply(int row, int p, const void* next, float* c) const {
  const int n = std::min(kRowsPerBlock, num_rows_ - row);
  const void* panel = matrix_.panel(p);
  const auto block = [&](auto* weights) {
    multiply_block(input_.row<float>(row), input_.stride, n, weights, matrix_.num_in, next, c);
  };
  switch (matrix_.format) {
    case kFloat: return block(static_cast<const float*>(panel));
    case kHalf: return block(static_cast<const Half*>(panel));
    case kBrain: return block(static_cast<const Brain*>(panel));
#if ILLM_HAS_AMX
    case kBrainTiles:
      return multiply_block_of_tiles(input_.row<Brain>(row), n, static_cast<const Brain*>(panel),
                                     matrix_.num_in, next, c);
#endif
  }
}

}  // namespace illm
