// The paged KVCache of an instance, and where a row of it is written.
#pragma once

#include <cstdint>

#include "simd.h"

namespace illm {

// Of stored numbers. Weights only: those in blocks (blocks.h), and tiles of the matrix unit.
enum Format : int32_t {
  kFloat, kHalf, kBrain,
  kFourBits, kEightBits,
  kBrainTiles, kFourBitTiles, kEightBitTiles,
};

// Mirrored by kernels/native/library.py.
struct Pool {
  void* data;  // [num_blocks, num_layers, 2 (K, V), num_kv_heads, block_size, head_dim]
  int32_t num_blocks, num_layers, num_kv_heads, block_size, head_dim, format;

  int64_t plane_size() const { return int64_t(num_kv_heads) * block_size * head_dim; }
  int64_t block_stride() const { return int64_t(num_layers) * 2 * plane_size(); }

  template <class T>
  T* layer_start(int layer) const {
    return static_cast<T*>(data) + layer * 2 * plane_size();
  }
};

template <class T>
void write_heads(const Pool& pool, T* to, const float* row) {
  for (int h = 0; h < pool.num_kv_heads; ++h, row += pool.head_dim) {
    T* head = to + int64_t(h) * pool.block_size * pool.head_dim;
    for (int d = 0; d < pool.head_dim; ++d) head[d] = (T)row[d];
  }
}

template <class T>
void write_slot(const Pool& pool, int layer, int64_t slot, const float* k, const float* v) {
  T* to = pool.layer_start<T>(layer) + slot / pool.block_size * pool.block_stride() +
          slot % pool.block_size * pool.head_dim;
  write_heads(pool, to, k);
  write_heads(pool, to + pool.plane_size(), v);
}

// k and v [num_kv_heads, head_dim] of one token to its slot.
inline void write_kv(const Pool& pool, int layer, int64_t slot, const float* k, const float* v) {
  switch (pool.format) {
    case kFloat: return write_slot<float>(pool, layer, slot, k, v);
    case kHalf: return write_slot<Half>(pool, layer, slot, k, v);
    default: return write_slot<Brain>(pool, layer, slot, k, v);
  }
}

}  // namespace illm
