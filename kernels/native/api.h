// What one call works on, and the checks that keep its indices inside the pool.
#pragma once

#include <cstdint>

#include "partial.h"
#include "pool.h"
#include "thread_pool.h"

namespace illm {

// Which rows read which blocks, as kernels/partial.py has it. Mirrored by kernels/native/library.py.
struct PagedRows {
  const int32_t *row_start, *table_start, *block_ids, *kv_len;
  int32_t num_seqs, is_causal;
};

struct AttentionCall {
  Pool pool;
  int layer;
  const float* q;  // [rows, num_heads, head_dim]
  int num_heads;
  PagedRows rows;
  Partial out;

  int64_t partial_row_size() const { return int64_t(num_heads) * (pool.head_dim + 2); }
};

void micro_attention(ThreadPool& threads, const AttentionCall& call);

}  // namespace illm
