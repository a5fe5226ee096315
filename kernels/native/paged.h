// Where the K or V of one KV head lies: a row of head_dim elements per slot.
#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.h"
#include "tile.h"

namespace illm {

template <class T>
struct PagedHead {
  const T* base;         // of block 0, in this layer
  int64_t block_stride;  // elements
  const int32_t* block_ids;
  int block_shift;  // log2 of the block size
  int head_dim;

  const T* row(int slot) const { return row(block_ids, slot); }

  const T* row(const int32_t* ids, int slot) const {
    const int offset = slot & ((1 << block_shift) - 1);
    return base + ids[slot >> block_shift] * block_stride + int64_t(offset) * head_dim;
  }

  // Of the i-th slot that is upcoming; null beyond the last.
  const T* row(const Upcoming& upcoming, int i) const {
    const int slot = upcoming.begin + i;
    return slot < upcoming.end ? row(upcoming.block_ids, slot) : nullptr;
  }
};

// The rows of kLanes slots, which lie in one block (a block holds a multiple of kLanes); in place
// of those from `end` on, the last row before it.
template <class T>
inline void find_rows(const PagedHead<T>& head, int slot, int end, const T* (&rows)[kLanes]) {
  const int last = std::clamp(end - slot, 1, kLanes) - 1;
  const T* first = head.row(std::min(slot, end - 1));
  for (int i = 0; i < kLanes; ++i) rows[i] = first + std::min(i, last) * head.head_dim;
}

}  // namespace illm
