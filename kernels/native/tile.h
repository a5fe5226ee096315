// One tile of query vectors against one chunk of slots of one KV head: scores, softmax, values.
// Both products are the same small matrix product, C[rows, 2 vectors] += A[rows, k] B[k, 2 vectors].
#pragma once

#include <algorithm>
#include <cmath>

#include "simd.h"

namespace illm {

constexpr int kPanel = 2 * kLanes;       // columns of one product
constexpr int kRowsPerProduct = kLanes == 8 ? 4 : 8;  // bounded by the number of registers
constexpr int kStride = 272;             // floats between rows of A; odd in cache lines
constexpr int kMaxHeadDim = 256;
constexpr int kMaxChunk = 128;           // slots per chunk; <= kStride

inline int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

template <int Rows>
inline void multiply(const float* a, const float* b, int b_stride, int depth, Vec (&c)[Rows][2]) {
  for (int k = 0; k < depth; ++k, b += b_stride) {
    const Vec b0 = load(b), b1 = load(b + kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) {
      const float x = a[i * kStride + k];
      c[i][0] += x * b0;
      c[i][1] += x * b1;
    }
  }
}

// scores[rows, columns] = queries[rows, dim] keys[panel][dim, kPanel]
template <int Rows>
void score_rows(const float* queries, const float* keys, int dim, int columns, float* scores) {
  for (int column = 0; column < columns; column += kPanel, keys += dim * kPanel) {
    Vec c[Rows][2] = {};
    multiply<Rows>(queries, keys, kPanel, dim, c);
    for (int i = 0; i < Rows; ++i) {
      store(scores + i * kStride + column, c[i][0]);
      store(scores + i * kStride + column + kLanes, c[i][1]);
    }
  }
}

// acc[rows, dim] = acc * scale + weights[rows, columns] values[columns, dim]; dim is padded
template <int Rows>
void weigh_rows(const float* weights, const float* values, int dim, int columns,
                const float* scale, float* acc) {
  for (int d = 0; d < dim; d += kPanel) {
    Vec c[Rows][2];
    for (int i = 0; i < Rows; ++i) {
      c[i][0] = load(acc + i * dim + d) * scale[i];
      c[i][1] = load(acc + i * dim + d + kLanes) * scale[i];
    }
    multiply<Rows>(weights, values + d, dim, columns, c);
    for (int i = 0; i < Rows; ++i) {
      store(acc + i * dim + d, c[i][0]);
      store(acc + i * dim + d + kLanes, c[i][1]);
    }
  }
}

// Turns the scores of one row into weights exp(s - max), updates max and sum, and returns what the
// row's earlier weights must be multiplied with. At least one slot is visible.
inline float soften_row(float* scores, int visible, int columns, float* max, float* sum) {
  for (int j = visible; j < columns; ++j) scores[j] = -INFINITY;
  Vec top = load(scores);
  for (int j = kLanes; j < columns; j += kLanes) top = illm::max(top, load(scores + j));
  const float next = std::max(*max, max_of(top));
  const float base = next == -INFINITY ? 0.0f : next;
  Vec total{};
  for (int j = 0; j < columns; j += kLanes) {
    const Vec weight = exp_nonpositive(load(scores + j) - base);
    store(scores + j, weight);
    total += weight;
  }
  const float scale = *max == -INFINITY ? 0.0f : std::exp(*max - base);
  *sum = *sum * scale + sum_of(total);
  *max = next;
  return scale;
}

using ScoreRows = void (*)(const float*, const float*, int, int, float*);
using WeighRows = void (*)(const float*, const float*, int, int, const float*, float*);

template <int... I>
inline ScoreRows score_rows_for(int rows, std::integer_sequence<int, I...>) {
  static constexpr ScoreRows table[] = {score_rows<I + 1>...};
  return table[rows - 1];
}

template <int... I>
inline WeighRows weigh_rows_for(int rows, std::integer_sequence<int, I...>) {
  static constexpr WeighRows table[] = {weigh_rows<I + 1>...};
  return table[rows - 1];
}

// Query vectors with their running (acc, max, sum); acc rows are padded to whole panels.
struct Tile {
  const float* queries;  // [rows, kStride]
  float* acc;            // [rows, padded_dim]
  float* max;            // [rows]
  float* sum;            // [rows]
};

// Adds a chunk: keys [panel][dim, kPanel], values [columns, padded_dim]. visible(i) says how many
// of its first slots row i sees; rows before `first` see none.
template <class Visible>
void attend(const Tile& tile, int first, int rows, const float* keys, const float* values, int dim,
            int columns, float* scores, const Visible& visible) {
  constexpr auto sizes = std::make_integer_sequence<int, kRowsPerProduct>{};
  const int padded_dim = round_up(dim, kPanel), padded_columns = round_up(columns, kPanel);
  for (int row = first; row < rows; row += kRowsPerProduct) {
    const int n = std::min(kRowsPerProduct, rows - row);
    float scale[kRowsPerProduct];
    score_rows_for(n, sizes)(tile.queries + row * kStride, keys, dim, padded_columns, scores);
    for (int i = 0; i < n; ++i)
      scale[i] = soften_row(scores + i * kStride, visible(row + i), padded_columns,
                            tile.max + row + i, tile.sum + row + i);
    weigh_rows_for(n, sizes)(scores, values, padded_dim, columns, scale,
                             tile.acc + row * padded_dim);
  }
}

}  // namespace illm
