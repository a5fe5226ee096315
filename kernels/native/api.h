// What one call works on, and the checks that keep its indices inside the pool.
#pragma once

#include <cstdint>

#include "matrix.h"
#include "partial.h"
#include "thread_pool.h"

namespace illm {

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

struct AttentionCall {
  Pool pool;
  int layer;
  const float* q;  // [rows, num_heads, head_dim]
  int num_heads;
  int num_seqs;
  const int32_t *row_start, *table_start, *block_ids, *kv_len;
  bool is_causal;
  Partial out;

  int64_t partial_row_size() const { return int64_t(num_heads) * (pool.head_dim + 2); }
};

void micro_attention(ThreadPool& threads, const AttentionCall& call);

}  // namespace illm
