// Brings a chunk of one KV head from its blocks into cache in the shape the products want:
// K transposed into panels, V as float32 rows. Touches the next chunk's memory on the way.
#pragma once

#include <algorithm>

#include "tile.h"

namespace illm {

// Where the K (or V) rows of one KV head and layer lie; a slot's row is `head_dim` elements.
template <class T>
struct PagedHead {
  const T* base;         // of block 0
  int64_t block_stride;  // elements
  const int32_t* block_ids;
  int block_shift;  // log2 of the block size
  int head_dim;

  const T* row(int slot) const {
    const int offset = slot & ((1 << block_shift) - 1);
    return base + block_ids[slot >> block_shift] * block_stride + int64_t(offset) * head_dim;
  }
};

constexpr int kCacheLine = 64;

// A burst of prefetches overflows the fill buffers, so each step of staging asks for a little.
template <class T>
inline void prefetch(const T* rows, int num_elements) {
  const char* p = reinterpret_cast<const char*>(rows);
  for (int i = 0; i < num_elements * (int)sizeof(T); i += kCacheLine) __builtin_prefetch(p + i, 0, 2);
}

// K of slots [begin, end) to panels[(slot - begin) / kPanel][dim][kPanel]; the slots that fill up
// the last panel are zero. The block size is a multiple of kLanes: kLanes slots lie in one block.
template <class T>
void stage_keys(const PagedHead<T>& head, int begin, int end, int prefetch_end, float* panels) {
  static const T zeros[kMaxHeadDim] = {};
  const int dim = head.head_dim, span = end - begin;
  for (int column = 0; column < round_up(span, kPanel); column += kLanes) {
    const T* rows[kLanes];
    for (int i = 0; i < kLanes; ++i)
      rows[i] = column + i < span ? head.row(begin + column) + i * dim : zeros;
    const int next = begin + column + span;
    const T* next_rows = next < prefetch_end ? head.row(next) : nullptr;
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
void stage_values(const PagedHead<T>& head, int begin, int end, int prefetch_end, float* values) {
  const int dim = head.head_dim, padded_dim = round_up(dim, kPanel);
  for (int slot = begin; slot < end; ++slot, values += padded_dim) {
    const T* row = head.row(slot);
    const int next = slot + end - begin;
    if (next < prefetch_end) prefetch(head.row(next), dim);
    for (int d = 0; d < dim; d += kLanes) store(values + d, load_some(row + d, dim - d));
  }
}

}  // namespace illm
