// MicroAttention over a paged pool (equation 2).
//
// A plan cuts the batch into items that threads take in any order. A sequence of few rows (decode)
// is cut into fixed splits of its context, each item walking the blocks once with the KV heads
// inside, and the splits are merged; one of many rows (a prefill chunk) is cut into row tiles per
// KV head. The cuts depend on the sequence alone: neither its batch nor the number of threads
// changes a bit of the result.

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "api.h"
#include "buffer.h"
#include "narrow.h"
#include "stage.h"
#include "tiled.h"

namespace illm {
namespace {

constexpr int kFewVectors = 16;    // query vectors per KV head up to which a sequence is decode-like
constexpr int kSplit = 1024;       // slots
constexpr int kDecodeChunk = 64;   // slots of every KV head: enough work to hide the next chunk
constexpr int kTileVectors = 384;  // query vectors of a prefill tile
constexpr int kScoreRows = 32;     // that are worked on at a time, at most

struct Item {
  int seq;
  int first_row, num_rows;  // within the sequence
  int first_head, num_heads;
  int begin, end;  // slots
  int chunk;
  Partial out;  // of first_row, all heads
};

struct Batch {
  const AttentionCall& call;
  int group;

  int num_rows(int seq) const { return call.rows.row_start[seq + 1] - call.rows.row_start[seq]; }

  // Slots that a row of the sequence sees; may be negative.
  int visible(int seq, int row) const {
    return call.rows.kv_len[seq] - (call.rows.is_causal ? num_rows(seq) - 1 - row : 0);
  }
};

class Scratch {
 public:
  float *queries, *acc, *max, *sum;  // of an item's vectors
  float *keys, *values;              // of a chunk, staged
  float* scores;
  Brain *query_tiles, *operand;

  void reset(int num_vectors, int dim) {
    const int padded_dim = round_up(dim, kPanel);
    queries = buffers_[0].take<float>(int64_t(num_vectors) * kStride);
    acc = buffers_[1].take<float>(int64_t(num_vectors) * padded_dim);
    const int padded_vectors = round_up(num_vectors, kTiledRows);
    max = buffers_[2].take<float>(padded_vectors);
    sum = buffers_[3].take<float>(padded_vectors);
    keys = buffers_[4].take<float>(kMaxChunk * dim);
    values = buffers_[5].take<float>(kMaxChunk * padded_dim);
    scores = buffers_[6].take<float>(kScoreRows * kStride);
    operand = buffers_[7].take<Brain>(kScoreRows * kMaxHeadDim);
    query_tiles = buffers_[8].take<Brain>(int64_t(padded_vectors) * padded_dim);
    std::fill_n(acc, num_vectors * padded_dim, 0.0f);
    std::fill_n(max, num_vectors, -INFINITY);
    std::fill_n(sum, num_vectors, 0.0f);
  }

 private:
  Buffer buffers_[9];
};

// Vectors are ordered KV head, row, query head of the group: a KV head's are one tile.
template <class Visit>
void for_each_vector(const Item& item, int group, const Visit& visit) {
  int vector = 0;
  for (int h = item.first_head; h < item.first_head + item.num_heads; ++h)
    for (int row = 0; row < item.num_rows; ++row)
      for (int g = 0; g < group; ++g) visit(vector++, row, h * group + g);
}

void load_queries(const Batch& batch, const Item& item, Scratch& scratch) {
  const AttentionCall& call = batch.call;
  const int64_t dim = call.pool.head_dim;
  const float* q =
      call.q + (call.rows.row_start[item.seq] + item.first_row) * call.num_heads * dim;
  for_each_vector(item, batch.group, [&](int vector, int row, int head) {
    const float* from = q + (int64_t(row) * call.num_heads + head) * dim;
    std::copy(from, from + dim, scratch.queries + int64_t(vector) * kStride);
  });
}

void store_partial(const Batch& batch, const Item& item, const Scratch& scratch) {
  const int64_t dim = batch.call.pool.head_dim, padded_dim = round_up(dim, kPanel);
  for_each_vector(item, batch.group, [&](int vector, int row, int head) {
    const Partial out = item.out.at(int64_t(row) * batch.call.num_heads + head, dim);
    const float* acc = scratch.acc + vector * padded_dim;
    std::copy(acc, acc + dim, out.acc);
    *out.max = scratch.max[vector];
    *out.sum = scratch.sum[vector];
  });
}

template <class T, class Visible>
void attend_wide(const Tile& tile, const Chunk& chunk, const PagedHead<T>& keys,
                 const PagedHead<T>& values, Scratch& scratch, const Visible& visible) {
#if ILLM_HAS_AMX
  if constexpr (std::is_same_v<T, Brain>) {
    if (keys.head_dim % kTileDepth == 0 && may_use_amx()) {
      Brain *key_tiles = (Brain*)scratch.keys, *value_tiles = (Brain*)scratch.values;
      tile_keys(keys, chunk, key_tiles);
      tile_values(values, chunk, value_tiles);
      if (chunk.begin == 0)
        narrow_rows(tile.queries, chunk.num_rows, keys.head_dim, scratch.query_tiles);
      return attend_tiled(tile, chunk, scratch.query_tiles, key_tiles, value_tiles, keys.head_dim,
                          scratch.scores, scratch.operand, visible);
    }
  }
#endif
  stage_keys(keys, chunk, scratch.keys);
  stage_values(values, chunk, scratch.values);
  attend_staged(tile, chunk, scratch.keys, scratch.values, keys.head_dim, scratch.scores, visible);
}

// A last chunk of a few slots would have no time to prefetch in, so it joins the one before.
int chunk_end(const Item& item, int begin) {
  const int left = item.end - begin;
  return left <= std::min(kMaxChunk, 2 * item.chunk - 1) ? item.end : begin + item.chunk;
}

// What follows the chunk that ends at `end`: more of its sequence or, so that the first chunk of
// that is not waited for, of the item that is likely to come next.
Upcoming find_upcoming(const Batch& batch, const Item& item, const Item* next, int end) {
  const auto table = [&](const Item& i) {
    return batch.call.rows.block_ids + batch.call.rows.table_start[i.seq];
  };
  if (end < item.end) return {table(item), end, chunk_end(item, end)};
  if (next && next->first_head == item.first_head)
    return {table(*next), next->begin, chunk_end(*next, next->begin)};
  return {};
}

template <class T>
void attend_item(const Batch& batch, const Item& item, const Item* next, Scratch& scratch) {
  const Pool& pool = batch.call.pool;
  const int dim = pool.head_dim, num_vectors = item.num_rows * batch.group;
  const int64_t head_size = int64_t(pool.block_size) * dim;
  const int32_t* block_ids = batch.call.rows.block_ids + batch.call.rows.table_start[item.seq];
  const int block_shift = __builtin_ctz(pool.block_size);
  for (int begin = item.begin, end; begin < item.end; begin = end) {
    end = chunk_end(item, begin);
    const Upcoming upcoming = find_upcoming(batch, item, next, end);
    int first = 0;
    while (batch.visible(item.seq, item.first_row + first) <= begin) ++first;
    for (int h = 0; h < item.num_heads; ++h) {
      const T* base = pool.layer_start<T>(batch.call.layer) + (item.first_head + h) * head_size;
      const PagedHead<T> keys{base, pool.block_stride(), block_ids, block_shift, dim};
      PagedHead<T> values = keys;
      values.base += pool.plane_size();
      const int64_t from = int64_t(h) * num_vectors;
      const Tile tile{scratch.queries + from * kStride,
                      scratch.acc + from * round_up(dim, kPanel),
                      scratch.max + from, scratch.sum + from};
      const auto visible = [&](int vector) {
        const int row = item.first_row + vector / batch.group;
        return std::min(batch.visible(item.seq, row), end) - begin;
      };
      const Chunk chunk{first * batch.group, num_vectors, begin, end, upcoming};
      if (num_vectors <= kFewVectors && dim % kPanel == 0) {
        attend_narrow(tile, chunk, keys, values, scratch.scores, visible);
      } else {
        attend_wide(tile, chunk, keys, values, scratch, visible);
      }
    }
  }
}

void run_item(const Batch& batch, const Item& item, const Item* next) {
  thread_local Scratch scratch;
  scratch.reset(item.num_heads * item.num_rows * batch.group, batch.call.pool.head_dim);
  load_queries(batch, item, scratch);
  switch (batch.call.pool.format) {
    case kFloat: attend_item<float>(batch, item, next, scratch); break;
    case kHalf: attend_item<Half>(batch, item, next, scratch); break;
    default: attend_item<Brain>(batch, item, next, scratch);
  }
  store_partial(batch, item, scratch);
}

struct Plan {
  std::vector<Item> items;
  std::vector<float> splits;  // partials of all splits but each sequence's first
};

bool has_few_rows(const Batch& batch, int seq) {
  return batch.num_rows(seq) * batch.group <= kFewVectors;
}

int num_splits(const Batch& batch, int seq) {
  if (!has_few_rows(batch, seq)) return 1;
  return std::max(1, (batch.call.rows.kv_len[seq] + kSplit - 1) / kSplit);
}

Partial split_partial(float* memory, int64_t rows, const AttentionCall& call) {
  const int64_t vectors = rows * call.num_heads;
  float* max = memory + vectors * call.pool.head_dim;
  return {memory, max, max + vectors};
}

void plan_splits(const Batch& batch, int seq, Item item, float* memory, Plan& plan) {
  const int kv_len = std::max(batch.call.rows.kv_len[seq], 0);
  item.num_rows = batch.num_rows(seq);
  item.num_heads = batch.call.pool.num_kv_heads;
  item.chunk = kDecodeChunk;
  for (int i = 0; i < num_splits(batch, seq); ++i) {
    item.begin = i * kSplit;
    item.end = std::min(item.begin + kSplit, kv_len);
    plan.items.push_back(item);
    item.out = split_partial(memory, item.num_rows, batch.call);
    memory += int64_t(item.num_rows) * batch.call.partial_row_size();
  }
}

void plan_tiles(const Batch& batch, int seq, Item item, Plan& plan) {
  const int num_rows = batch.num_rows(seq), rows = std::max(1, kTileVectors / batch.group);
  const Partial out = item.out;
  item.num_heads = 1;
  item.chunk = kMaxChunk;
  for (item.first_row = 0; item.first_row < num_rows; item.first_row += rows) {
    item.num_rows = std::min(rows, num_rows - item.first_row);
    item.end = std::max(0, batch.visible(seq, item.first_row + item.num_rows - 1));
    item.out = out.at(int64_t(item.first_row) * batch.call.num_heads, batch.call.pool.head_dim);
    for (item.first_head = 0; item.first_head < batch.call.pool.num_kv_heads; ++item.first_head)
      plan.items.push_back(item);
  }
}

// Calls visit(seq, memory): where the partials of the sequence's later splits lie.
template <class Visit>
void for_each_seq(const Batch& batch, Plan& plan, const Visit& visit) {
  float* memory = plan.splits.data();
  for (int seq = 0; seq < batch.call.rows.num_seqs; ++seq) {
    visit(seq, memory);
    const int64_t later = num_splits(batch, seq) - 1;
    memory += later * batch.num_rows(seq) * batch.call.partial_row_size();
  }
}

void make_plan(const Batch& batch, Plan& plan) {
  const AttentionCall& call = batch.call;
  int64_t size = 0;
  for (int seq = 0; seq < call.rows.num_seqs; ++seq)
    size += int64_t(num_splits(batch, seq) - 1) * batch.num_rows(seq) * call.partial_row_size();
  plan.splits.resize(std::max(plan.splits.size(), size_t(size)));
  plan.items.clear();
  for_each_seq(batch, plan, [&](int seq, float* memory) {
    if (batch.num_rows(seq) == 0) return;
    Item item{};
    item.seq = seq;
    item.out = call.out.at(int64_t(call.rows.row_start[seq]) * call.num_heads, call.pool.head_dim);
    if (has_few_rows(batch, seq)) {
      plan_splits(batch, seq, item, memory, plan);
    } else {
      plan_tiles(batch, seq, item, plan);
    }
  });
}

void merge_splits(const Batch& batch, Plan& plan) {
  const AttentionCall& call = batch.call;
  const int64_t dim = call.pool.head_dim;
  for_each_seq(batch, plan, [&](int seq, float* memory) {
    const int64_t rows = batch.num_rows(seq), vectors = rows * call.num_heads;
    const Partial out = call.out.at(int64_t(call.rows.row_start[seq]) * call.num_heads, dim);
    for (int i = 1; i < num_splits(batch, seq); ++i, memory += rows * call.partial_row_size()) {
      const Partial split = split_partial(memory, rows, call);
      for (int64_t v = 0; v < vectors; ++v) merge_head(out.at(v, dim), split.at(v, dim), dim);
    }
  });
}

}  // namespace

void micro_attention(ThreadPool& threads, const AttentionCall& call) {
  thread_local Plan plan;
  const Batch batch{call, call.num_heads / call.pool.num_kv_heads};
  make_plan(batch, plan);
  const std::vector<Item>& items = plan.items;
  const int count = (int)items.size();
  threads.run(count, [&](int i) {
    run_item(batch, items[i], i + 1 < count ? &items[i + 1] : nullptr);
  });
  merge_splits(batch, plan);
}

}  // namespace illm
