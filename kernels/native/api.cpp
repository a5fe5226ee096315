// The functions that Python calls through ctypes. Those that can fail return what was wrong with
// the arguments, or null; shapes and dtypes were checked by the caller, values are checked here.

#include "api.h"

#include <algorithm>

#include "amx.h"
#include "decoder.h"

namespace illm {
namespace {

const char* find_error(const AttentionCall& call, int64_t num_rows, int64_t num_block_ids) {
  if (call.row_start[0] != 0 || call.row_start[call.num_seqs] != num_rows)
    return "row_start must go from 0 to the number of rows";
  if (call.table_start[0] != 0 || call.table_start[call.num_seqs] != num_block_ids)
    return "table_start must go from 0 to the number of block ids";
  for (int i = 0; i < call.num_seqs; ++i) {
    const int64_t blocks = int64_t(call.table_start[i + 1]) - call.table_start[i];
    if (call.row_start[i + 1] < call.row_start[i] || blocks < 0)
      return "row_start and table_start must not decrease";
    if (call.kv_len[i] > blocks * call.pool.block_size)
      return "kv_len exceeds the slots of the sequence's blocks";
  }
  for (int64_t i = 0; i < num_block_ids; ++i)
    if (call.block_ids[i] < 0 || call.block_ids[i] >= call.pool.num_blocks)
      return "block ids must lie inside the pool";
  return nullptr;
}

const char* find_error(const int64_t* ids, int64_t count, int64_t limit) {
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= limit) return "slots and row_ids must lie inside what they index";
  return nullptr;
}

template <class T>
void write_rows(const Pool& pool, T* plane, const float* rows, const int64_t* slots,
                int64_t num_rows) {
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t block = slots[i] / pool.block_size, offset = slots[i] % pool.block_size;
    T* to = plane + block * pool.block_stride() + offset * pool.head_dim;
    for (int h = 0; h < pool.num_kv_heads; ++h, rows += pool.head_dim) {
      T* head = to + int64_t(h) * pool.block_size * pool.head_dim;
      for (int d = 0; d < pool.head_dim; ++d) head[d] = (T)rows[d];
    }
  }
}

template <class T>
void write_kv(const Pool& pool, int layer, const float* k, const float* v, const int64_t* slots,
              int64_t num_rows) {
  T* keys = pool.layer_start<T>(layer);
  write_rows(pool, keys, k, slots, num_rows);
  write_rows(pool, keys + pool.plane_size(), v, slots, num_rows);
}

}  // namespace
}  // namespace illm

using namespace illm;

extern "C" {

ThreadPool* illm_start_threads(int num_threads) { return new ThreadPool(num_threads); }

void illm_stop_threads(ThreadPool* threads) { delete threads; }

const char* illm_micro_attention(ThreadPool* threads, const Pool* pool, int layer, const float* q,
                                 int64_t num_rows, int num_heads, int num_seqs,
                                 const int32_t* row_start, const int32_t* table_start,
                                 const int32_t* block_ids, int64_t num_block_ids,
                                 const int32_t* kv_len, bool is_causal, float* acc, float* max,
                                 float* sum) {
  const AttentionCall call{*pool,     layer,       q,         num_heads, num_seqs, row_start,
                           table_start, block_ids, kv_len, is_causal, {acc, max, sum}};
  const char* error = find_error(call, num_rows, num_block_ids);
  if (!error) micro_attention(*threads, call);
  return error;
}

const char* illm_write_kv(const Pool* pool, int layer, const float* k, const float* v,
                          const int64_t* slots, int64_t num_rows) {
  const int64_t num_slots = int64_t(pool->num_blocks) * pool->block_size;
  const char* error = find_error(slots, num_rows, num_slots);
  if (error) return error;
  switch (pool->format) {
    case kFloat: write_kv<float>(*pool, layer, k, v, slots, num_rows); break;
    case kHalf: write_kv<Half>(*pool, layer, k, v, slots, num_rows); break;
    default: write_kv<Brain>(*pool, layer, k, v, slots, num_rows);
  }
  return nullptr;
}

const char* illm_merge_rows(float* acc, float* max, float* sum, int64_t num_into,
                            const int64_t* row_ids, int64_t num_rows, float* other_acc,
                            float* other_max, float* other_sum, int64_t num_heads, int64_t dim) {
  const char* error = find_error(row_ids, num_rows, num_into);
  if (error) return error;
  const Partial into{acc, max, sum}, other{other_acc, other_max, other_sum};
  for (int64_t i = 0; i < num_rows; ++i)
    for (int64_t h = 0; h < num_heads; ++h)
      merge_head(into.at(row_ids[i] * num_heads + h, dim), other.at(i * num_heads + h, dim), dim);
  return nullptr;
}

void illm_finalize(const float* acc, const float* sum, int64_t num_vectors, int64_t dim,
                   float* out) {
  for (int64_t i = 0; i < num_vectors; ++i, acc += dim, out += dim) {
    const float scale = sum[i] == 0.0f ? 0.0f : 1.0f / sum[i];
    for (int64_t d = 0; d < dim; ++d) out[d] = acc[d] * scale;
  }
}

// The format in which weights of a type are fastest here.
int32_t illm_fastest_format(int32_t format) {
  return format == kBrain && may_use_amx() ? kBrainTiles : format;
}

int64_t illm_matrix_bytes(const Matrix* matrix) {
  return matrix->num_panels() * matrix->panel_bytes();
}

void illm_pack(ThreadPool* threads, const Matrix* matrix, const float* first,
               const float* second) {
  pack(*threads, *matrix, first, second);
}

void illm_before_attention(ThreadPool* threads, const Layer* layer, const float* hidden,
                           int num_rows, const float* cos, const float* sin, float* q, float* k,
                           float* v) {
  before_attention(*threads, *layer, hidden, num_rows, cos, sin, {q, k, v});
}

void illm_after_attention(ThreadPool* threads, const Layer* layer, float* hidden, int num_rows,
                          const float* attended) {
  after_attention(*threads, *layer, hidden, num_rows, attended);
}

void illm_compute_logits(ThreadPool* threads, const float* norm, float eps, const Matrix* head,
                         const float* hidden, int num_rows, float* logits) {
  compute_logits(*threads, norm, eps, *head, hidden, num_rows, logits);
}
}
