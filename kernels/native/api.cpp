// The functions that Python calls through ctypes. Those that can fail return what was wrong with
// the arguments, or null; shapes and dtypes were checked by the caller, values are checked here.

#include "api.h"

#include <algorithm>

#include "amx.h"
#include "decoder.h"

namespace illm {
namespace {

const char* find_error(const PagedRows& rows, const Pool& pool, int64_t num_rows,
                       int64_t num_block_ids) {
  if (rows.row_start[0] != 0 || rows.row_start[rows.num_seqs] != num_rows)
    return "row_start must go from 0 to the number of rows";
  if (rows.table_start[0] != 0 || rows.table_start[rows.num_seqs] != num_block_ids)
    return "table_start must go from 0 to the number of block ids";
  for (int i = 0; i < rows.num_seqs; ++i) {
    const int64_t blocks = int64_t(rows.table_start[i + 1]) - rows.table_start[i];
    if (rows.row_start[i + 1] < rows.row_start[i] || blocks < 0)
      return "row_start and table_start must not decrease";
    if (rows.kv_len[i] > blocks * pool.block_size)
      return "kv_len exceeds the slots of the sequence's blocks";
  }
  for (int64_t i = 0; i < num_block_ids; ++i)
    if (rows.block_ids[i] < 0 || rows.block_ids[i] >= pool.num_blocks)
      return "block ids must lie inside the pool";
  return nullptr;
}

const char* find_error(const int64_t* ids, int64_t count, int64_t limit) {
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= limit) return "slots and row_ids must lie inside what they index";
  return nullptr;
}

}  // namespace
}  // namespace illm

using namespace illm;

extern "C" {

ThreadPool* illm_start_threads(int num_threads) { return new ThreadPool(num_threads); }

void illm_stop_threads(ThreadPool* threads) { delete threads; }

const char* illm_micro_attention(ThreadPool* threads, const Pool* pool, int layer, const float* q,
                                 int64_t num_rows, int num_heads, const PagedRows* rows,
                                 int64_t num_block_ids, float* acc, float* max, float* sum) {
  const char* error = find_error(*rows, *pool, num_rows, num_block_ids);
  if (!error)
    micro_attention(*threads, {*pool, layer, q, num_heads, *rows, {acc, max, sum}});
  return error;
}

const char* illm_write_kv(const Pool* pool, int layer, const float* k, const float* v,
                          const int64_t* slots, int64_t num_rows) {
  const int64_t num_slots = int64_t(pool->num_blocks) * pool->block_size;
  const char* error = find_error(slots, num_rows, num_slots);
  if (error) return error;
  const int64_t size = int64_t(pool->num_kv_heads) * pool->head_dim;
  for (int64_t i = 0; i < num_rows; ++i)
    write_kv(*pool, layer, slots[i], k + i * size, v + i * size);
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
  for (int64_t i = 0; i < num_vectors; ++i)
    finalize_head(acc + i * dim, sum[i], dim, out + i * dim);
}

// The format in which weights of a type are fastest here.
int32_t illm_fastest_format(int32_t format) {
  if (!may_use_amx()) return format;
  switch (format) {
    case kBrain: return kBrainTiles;
    case kFourBits: return kFourBitTiles;
    case kEightBits: return kEightBitTiles;
    default: return format;
  }
}

int64_t illm_matrix_bytes(const Matrix* matrix) {
  return matrix->num_panels() * matrix->panel_bytes();
}

void illm_pack(ThreadPool* threads, const Matrix* matrix, const void* first,
               const void* second) {
  pack(*threads, *matrix, first, second);
}

// What is wrong with where the step's rows read and write, or null; asked once, before its layers.
const char* illm_check_step(const Step* step, int64_t num_block_ids) {
  const int64_t num_slots = int64_t(step->pool.num_blocks) * step->pool.block_size;
  const char* error = find_error(step->slots, step->num_rows, num_slots);
  return error ? error : find_error(step->rows, step->pool, step->num_rows, num_block_ids);
}

void illm_begin_layer(ThreadPool* threads, const Layer* layers, int index, const Step* step) {
  begin_layer(*threads, layers[index], index, *step);
}

void illm_attend(ThreadPool* threads, const Layer* layers, int index, Step* step) {
  attend(*threads, layers[index], index, *step);
}

void illm_end_layer(ThreadPool* threads, const Layer* layers, int index, const Step* step) {
  end_layer(*threads, layers[index], nullptr, *step);
}

int illm_run_layers(ThreadPool* threads, const Layer* layers, int num_layers, Step* step,
                    WiredPart* parts, int num_parts) {
  return run_layers(*threads, layers, num_layers, *step, parts, num_parts);
}

const char* illm_answer_layers(ThreadPool* threads, const Pool* pool, int num_layers,
                               const PagedRows* rows, int64_t num_block_ids, int num_heads,
                               WiredPart* part, int first, double patience_s) {
  const char* error = find_error(*rows, *pool, part->num_rows, num_block_ids);
  if (!error)
    answer_layers(*threads, *pool, *rows, num_heads, *part, first, num_layers, patience_s);
  return error;
}

void illm_compute_logits(ThreadPool* threads, const float* norm, float eps, const Matrix* head,
                         const float* hidden, int num_rows, float* logits) {
  compute_logits(*threads, norm, eps, *head, hidden, num_rows, logits);
}

void illm_find_likeliest(ThreadPool* threads, const float* rows, int num_rows, int size,
                         int64_t* out) {
  find_likeliest(*threads, rows, num_rows, size, out);
}
}
