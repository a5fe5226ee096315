// A few query vectors (decode) against a chunk of slots of one KV head, straight from the blocks:
// memory is the limit, so K and V are touched once and never copied.
#pragma once

#include "paged.h"
#include "tile.h"

namespace illm {

constexpr int kSlotsPerStep = 4;
constexpr int kRowsPerStep = kLanes == 8 ? 2 : 4;  // bounded by the number of registers

// scores[rows, kLanes] of the slots whose K lies at keys[i], the next chunk's at next_keys.
template <int Rows, class T>
inline void score_slots(const float* queries, const T* const (&keys)[kLanes], const T* next_keys,
                        int dim, float* scores) {
  constexpr int kSteps = kLanes / kSlotsPerStep;
  Vec partial[Rows][kSteps];
#pragma GCC unroll 4
  for (int step = 0; step < kSteps; ++step) {
    const T* const* k = keys + step * kSlotsPerStep;
    if (next_keys) prefetch(next_keys + step * kSlotsPerStep * dim, kSlotsPerStep * dim);
    Vec c[Rows][kSlotsPerStep] = {};
    for (int d = 0; d < dim; d += kLanes) {
      const Vec k0 = load(k[0] + d), k1 = load(k[1] + d), k2 = load(k[2] + d), k3 = load(k[3] + d);
#pragma GCC unroll 4
      for (int i = 0; i < Rows; ++i) {
        const Vec q = load(queries + i * kStride + d);
        c[i][0] += q * k0;
        c[i][1] += q * k1;
        c[i][2] += q * k2;
        c[i][3] += q * k3;
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < Rows; ++i) partial[i][step] = fold_all<kSlotsPerStep, kLanes>(c[i], Plus());
  }
#pragma GCC unroll 4
  for (int i = 0; i < Rows; ++i)
    store(scores + i * kStride, fold_all<kSteps, kLanes / kSlotsPerStep>(partial[i], Plus()));
}

// Adds a chunk that begins with a block; head_dim is whole panels, scores has room for every row.
template <class T, class Visible>
void attend_narrow(const Tile& tile, const Chunk& chunk, const PagedHead<T>& keys,
                   const PagedHead<T>& values, float* scores, const Visible& visible) {
  const int dim = keys.head_dim, block_size = 1 << keys.block_shift;
  const int first = chunk.first_row, rows = chunk.num_rows;
  for (int column = 0; column < chunk.num_slots(); column += kLanes) {
    const T* slots[kLanes];
    find_rows(keys, chunk.begin + column, chunk.end, slots);
    const T* next_keys = keys.row(chunk.upcoming, column);
    for (int row = first; row < rows; row += kRowsPerStep, next_keys = nullptr)
      with_constant<kRowsPerStep>(std::min(kRowsPerStep, rows - row), [&](auto count) {
        score_slots<count>(tile.queries + row * kStride, slots, next_keys, dim,
                           scores + row * kStride + column);
      });
  }
  for (int row = first; row < rows; ++row)
    soften_row(tile, row, dim, scores + row * kStride, visible(row),
               round_up(chunk.num_slots(), kLanes));
  for (int slot = chunk.begin; slot < chunk.end; slot += block_size) {
    const int count = std::min(block_size, chunk.end - slot);
    const T* next_values = values.row(chunk.upcoming, slot - chunk.begin);
    int64_t ahead = next_values ? next_values - values.row(slot) : 0;
    for (int row = first; row < rows; row += kRowsPerProduct, ahead = 0)
      with_constant<kRowsPerProduct>(std::min(kRowsPerProduct, rows - row), [&](auto n) {
        weigh_rows<n>(scores + row * kStride + slot - chunk.begin, values.row(slot), dim, count,
                      ahead, tile.acc + row * dim);
      });
  }
}

}  // namespace illm
