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

// Prefetches, bit by bit, what lies `ahead` elements of b on, if that is not 0.
template <int Rows, class T>
inline void multiply(const float* a, int a_stride, const T* b, int b_stride, int depth,
                     int64_t ahead, Vec (&c)[Rows][2]) {
  for (int k = 0; k < depth; ++k, b += b_stride) {
    if (ahead) prefetch(b + ahead, kPanel);
    const Vec b0 = load(b), b1 = load(b + kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) {
      const float x = a[i * a_stride + k];
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
    multiply<Rows>(queries, kStride, keys, kPanel, dim, 0, c);
    for (int i = 0; i < Rows; ++i) {
      store(scores + i * kStride + column, c[i][0]);
      store(scores + i * kStride + column + kLanes, c[i][1]);
    }
  }
}

// acc[rows, dim] += weights[rows, columns] values[columns, dim]; dim is whole panels
template <int Rows, class T>
void weigh_rows(const float* weights, const T* values, int dim, int columns, int64_t ahead,
                float* acc) {
  for (int d = 0; d < dim; d += kPanel) {
    Vec c[Rows][2];
    for (int i = 0; i < Rows; ++i) {
      c[i][0] = load(acc + i * dim + d);
      c[i][1] = load(acc + i * dim + d + kLanes);
    }
    multiply<Rows>(weights, kStride, values + d, dim, columns, ahead, c);
    for (int i = 0; i < Rows; ++i) {
      store(acc + i * dim + d, c[i][0]);
      store(acc + i * dim + d + kLanes, c[i][1]);
    }
  }
}

// Query vectors with their running (acc, max, sum); acc rows are padded to whole panels.
struct Tile {
  const float* queries;  // [rows, kStride]
  float* acc;            // [rows, padded_dim]
  float* max;            // [rows]
  float* sum;            // [rows]
};

// Slots that will be read after a chunk: of the same sequence, or the first of another.
struct Upcoming {
  const int32_t* block_ids;
  int begin, end;
};

// What a tile meets next.
struct Chunk {
  int first_row, num_rows;  // rows of the tile that see some of it
  int begin, end;
  Upcoming upcoming;

  int num_slots() const { return end - begin; }
};

inline void scale_row(float* acc, int padded_dim, float scale) {
  for (int d = 0; d < padded_dim; d += kLanes) store(acc + d, load(acc + d) * scale);
}

// Turns a row's scores into weights exp(s - max) and adds them to its sum; a new maximum scales
// down what the row has gathered so far. At least one slot is visible.
inline void soften_row(const Tile& tile, int row, int padded_dim, float* scores, int visible,
                       int columns) {
  for (int j = visible; j < columns; ++j) scores[j] = -INFINITY;
  Vec top = load(scores);
  for (int j = kLanes; j < columns; j += kLanes) top = max(top, load(scores + j));
  const float before = tile.max[row], next = std::max(before, max_of(top));
  const float base = next == -INFINITY ? 0.0f : next;
  Vec total{};
  for (int j = 0; j < columns; j += kLanes) {
    const Vec weight = exp_nonpositive(load(scores + j) - base);
    store(scores + j, weight);
    total += weight;
  }
  if (next > before) {
    const float scale = std::exp(before - base);
    scale_row(tile.acc + row * padded_dim, padded_dim, scale);
    tile.sum[row] *= scale;
    tile.max[row] = next;
  }
  tile.sum[row] += sum_of(total);
}

// Calls f with n as a constant, 1 <= n <= Max: the products keep their rows in registers.
template <int Max, class F>
inline void with_constant(int n, const F& f) {
  if constexpr (Max > 1) {
    if (n < Max) return with_constant<Max - 1>(n, f);
  }
  f(std::integral_constant<int, Max>{});
}

// Adds a staged chunk: keys [panel][dim, kPanel], values [slot, padded_dim]. visible(i) says how
// many of its first slots row i sees.
template <class Visible>
void attend_staged(const Tile& tile, const Chunk& chunk, const float* keys, const float* values,
                   int dim, float* scores, const Visible& visible) {
  const int padded_dim = round_up(dim, kPanel), columns = round_up(chunk.num_slots(), kPanel);
  for (int row = chunk.first_row; row < chunk.num_rows; row += kRowsPerProduct) {
    const int n = std::min(kRowsPerProduct, chunk.num_rows - row);
    with_constant<kRowsPerProduct>(n, [&](auto count) {
      score_rows<count>(tile.queries + row * kStride, keys, dim, columns, scores);
    });
    for (int i = 0; i < n; ++i)
      soften_row(tile, row + i, padded_dim, scores + i * kStride, visible(row + i), columns);
    with_constant<kRowsPerProduct>(n, [&](auto count) {
      weigh_rows<count>(scores, values, padded_dim, chunk.num_slots(), 0,
                        tile.acc + row * padded_dim);
    });
  }
}

}  // namespace illm
