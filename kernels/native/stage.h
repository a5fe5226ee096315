// Brings a chunk of one KV head from its blocks into the shape that large tiles want: K transposed
// into panels, V as float32 rows. Touches the next chunk's memory on the way.
#pragma once

#include <algorithm>

#include "paged.h"
#include "tile.h"

namespace illm {

// K of slots [begin, end) to panels[(slot - begin) / kPanel][dim][kPanel]. The columns that fill
// up the last panel hold some other slot's K: nothing beyond `end` is read.
template <class T>
void stage_keys(const PagedHead<T>& head, const Chunk& chunk, float* panels) {
  const int dim = head.head_dim, span = chunk.num_slots();
  for (int column = 0; column < round_up(span, kPanel); column += kLanes) {
    const T* rows[kLanes];
    find_rows(head, chunk.begin + column, chunk.end, rows);
    const T* next_rows = head.row(chunk.upcoming, column);
    float* panel = panels + column / kPanel * kPanel * dim + column % kPanel;
    for (int d = 0; d < dim; d += kLanes) {
      Vec tile[kLanes];
      const int width = std::min(kLanes, dim - d);
      if (width == kLanes) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) tile[i] = load(rows[i] + d);
      } else {
        for (int i = 0; i < kLanes; ++i) tile[i] = load_some(rows[i] + d, width);
      }
      transpose(tile);
      if (next_rows) prefetch(next_rows + d * kLanes, width * kLanes);
      for (int i = 0; i < width; ++i) store(panel + (d + i) * kPanel, tile[i]);
    }
  }
}

// V of slots [begin, end) to values[slot - begin][padded_dim].
template <class T>
void stage_values(const PagedHead<T>& head, const Chunk& chunk, float* values) {
  const int dim = head.head_dim, padded_dim = round_up(dim, kPanel);
  for (int slot = chunk.begin; slot < chunk.end; ++slot, values += padded_dim) {
    const T* row = head.row(slot);
    if (const T* next = head.row(chunk.upcoming, slot - chunk.begin)) prefetch(next, dim);
    for (int d = 0; d < dim; d += kLanes) store(values + d, load_some(row + d, dim - d));
  }
}

}  // namespace illm
