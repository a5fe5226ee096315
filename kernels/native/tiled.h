// Many query vectors (prefill) against a chunk of slots of one KV head through the matrix unit:
// queries, K, the weights of the softmax and V are bfloat16, all sums float.
#pragma once

#include "amx.h"
#include "paged.h"
#include "tile.h"

namespace illm {

constexpr int kTiledRows = 2 * kTileRows;
constexpr float kLog2E = 1.44269504f;

#if ILLM_HAS_AMX

// K of the chunk to panels of 32 slots, [dim / 32][2][16 pairs of dim][16 slots][2]. Columns beyond
// the chunk hold some other slot's K: nothing beyond its end is read.
inline void tile_keys(const PagedHead<Brain>& head, const Chunk& chunk, Brain* panels) {
  const int dim = head.head_dim;
  for (int column = 0; column < round_up(chunk.num_slots(), kPanel); column += kLanes) {
    const Brain* rows[kLanes];
    find_rows(head, chunk.begin + column, chunk.end, rows);
    const Brain* next_rows = head.row(chunk.upcoming, column);
    Brain* panel = panels + column / kPanel * kPanel * dim + column % kPanel / kLanes * kTileSize;
    for (int d = 0; d < dim; d += kTileDepth) {
      Vec tile[kLanes];
      for (int i = 0; i < kLanes; ++i) std::memcpy(&tile[i], rows[i] + d, sizeof(Vec));
      transpose(tile);
      if (next_rows) prefetch(next_rows + d * kLanes, kTileDepth * kLanes);
      std::memcpy(panel + d / kTileDepth * 2 * kTileSize, tile, sizeof tile);
    }
  }
}

// V of the chunk to panels of 32 dims, [slots / 32][2][16 pairs of slots][16 dims][2]; slots beyond
// the chunk are zeros.
inline void tile_values(const PagedHead<Brain>& head, const Chunk& chunk, Brain* panels) {
  const int dim = head.head_dim, depth = round_up(chunk.num_slots(), kTileDepth);
  const auto bits = [&](int slot, int d) {
    return slot < chunk.end ? (WordVec)load(head.row(slot) + d) : WordVec{};
  };
  for (int j = 0; j < depth; j += 2) {
    if (const Brain* next = head.row(chunk.upcoming, j)) prefetch(next, 2 * dim);
    Brain* pair = panels + j / kTileDepth * 2 * kTileSize + j % kTileDepth / 2 * kTileDepth;
    for (int d = 0; d < dim; d += kLanes) {
      const WordVec words = bits(chunk.begin + j, d) >> 16 | bits(chunk.begin + j + 1, d);
      Brain* to = pair + d / kPanel * kPanel * depth + d % kPanel / kLanes * kTileSize;
      std::memcpy(to, &words, sizeof words);
    }
  }
}

// One bit for each lane in which a is above b.
inline uint32_t any_above(Vec a, Vec b) {
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
}

// Rows [num_rows, kStride] to rows of tiles.
inline void narrow_rows(const float* from, int num_rows, int width, Brain* to) {
  for (int i = 0; i < num_rows; ++i)
    for (int d = 0; d < width; d += kLanes)
      store(to + tiled_index(i, d, width), load(from + i * kStride + d));
}

inline void multiply_row_tiles(const Brain* a, int num_rows, const Brain* b, int depth, float* c,
                               int c_stride) {
  if (num_rows > kTileRows) {
    multiply_tiles<2>(a, b, depth, 0, c, c_stride);
  } else {
    multiply_tiles<1>(a, b, depth, 0, c, c_stride);
  }
}

// As soften_row for kTileRows rows at once, the first n of which count, with their weights rounded
// to rows of tiles. What the tile has gathered must have room for all of them.
template <class Visible>
void soften_tiles(const Tile& tile, int row, int n, int dim, float* scores, int columns,
                  Brain* weights, const Visible& visible) {
  static_assert(kTileRows == kLanes);
  Vec tops[kTileRows], totals[kTileRows];
  for (int i = 0; i < kTileRows; ++i) {
    float* own = scores + i * kStride;
    if (i < n)
      for (int j = std::max(0, visible(row + i)); j < columns; ++j) own[j] = -INFINITY;
    tops[i] = load(own);
    for (int j = kLanes; j < columns; j += kLanes) tops[i] = max(tops[i], load(own + j));
  }
  const Vec before = load(tile.max + row);
  const Vec next = max(before, fold_all<kLanes, kLanes>(tops, Max()));
  const Vec base = next == -INFINITY ? Vec{} : next;
  for (int i = 0; i < kTileRows; ++i) {
    const Vec lowered = splat(base[i] * kLog2E);
    totals[i] = Vec{};
    for (int j = 0; j < columns; j += kLanes) {
      const Vec weight = exp2_coarse(load(scores + i * kStride + j) * kLog2E - lowered);
      store(weights + tiled_index(i, j, columns), weight);
      totals[i] += weight;
    }
  }
  Vec sum = load(tile.sum + row);
  if (const uint32_t raised = any_above(next, before)) {
    const Vec scale = exp_nonpositive(before - base);
    for (int i = 0; i < n; ++i)
      if (raised >> i & 1) scale_row(tile.acc + (row + i) * dim, dim, scale[i]);
    sum *= scale;
    store(tile.max + row, next);
  }
  store(tile.sum + row, sum + fold_all<kLanes, kLanes>(totals, Plus()));
}

// As attend_staged, kTiledRows rows at a time, with the queries in rows of tiles; scores
// [kTiledRows, kStride], operand [kTiledRows, columns] in rows of tiles.
template <class Visible>
void attend_tiled(const Tile& tile, const Chunk& chunk, const Brain* queries, const Brain* keys,
                  const Brain* values, int dim, float* scores, Brain* operand,
                  const Visible& visible) {
  const int columns = round_up(chunk.num_slots(), kPanel);
  configure_tiles();
  for (int row = chunk.first_row / kTiledRows * kTiledRows; row < chunk.num_rows;
       row += kTiledRows) {
    const int n = std::min(kTiledRows, chunk.num_rows - row);
    for (int column = 0; column < columns; column += kPanel)
      multiply_row_tiles(queries + row * dim, n, keys + column * dim, dim, scores + column,
                         kStride);
    for (int i = 0; i < n; i += kTileRows)
      soften_tiles(tile, row + i, n - i, dim, scores + i * kStride, columns, operand + i * columns,
                   visible);
    for (int d = 0; d < dim; d += kPanel) {
      multiply_row_tiles(operand, n, values + d * columns, columns, scores, kStride);
      for (int i = 0; i < n; ++i) {
        float* acc = tile.acc + (row + i) * dim + d;
        store(acc, load(acc) + load(scores + i * kStride));
        store(acc + kLanes, load(acc + kLanes) + load(scores + i * kStride + kLanes));
      }
    }
  }
  release_tiles();
}

#endif

}  // namespace illm
