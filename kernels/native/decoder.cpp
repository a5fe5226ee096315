#include "decoder.h"

#include <algorithm>
#include <cmath>

#include "amx.h"
#include "buffer.h"
#include "clock.h"
#include "product.h"

namespace illm {
namespace {

constexpr int kRowsPerItem = 16;  // of the work between products

// The rows that a product will read, to be filled with put.
class InputRows {
 public:
  InputRows(Buffer& buffer, const Matrix& matrix, int num_rows)
      : is_brain_(matrix.is_tiles()), num_in_(matrix.num_in) {
    stride_ = round_up(num_in_, kTileDepth);
    const int64_t size = int64_t(round_up(num_rows, kTileRows)) * stride_;
    data_ = is_brain_ ? (void*)buffer.take<Brain>(size) : (void*)buffer.take<float>(size);
    if (is_brain_ && stride_ > num_in_)
      for (int i = 0; i < num_rows; ++i)
        for (int d = num_in_; d < stride_; d += kLanes) put(i, d, Vec{});
  }

  void put(int64_t i, int column, Vec x) const {
    if (is_brain_) {
      store(static_cast<Brain*>(data_) + tiled_index(i, column, stride_), x);
    } else {
      store(static_cast<float*>(data_) + i * stride_ + column, x);
    }
  }

  operator Input() const { return {data_, stride_}; }

 private:
  bool is_brain_;
  int num_in_, stride_;
  void* data_;
};

template <class Visit>
void for_each_row(ThreadPool& threads, int num_rows, const Visit& visit) {
  threads.run((num_rows + kRowsPerItem - 1) / kRowsPerItem, [&](int item) {
    const int begin = item * kRowsPerItem, end = std::min(begin + kRowsPerItem, num_rows);
    for (int row = begin; row < end; ++row) visit(row);
  });
}

void normalize(ThreadPool& threads, const float* hidden, int size, int num_rows,
               const float* weight, float eps, const InputRows& out) {
  for_each_row(threads, num_rows, [&](int64_t row) {
    const float* x = hidden + row * size;
    Vec squares{};
    for (int d = 0; d < size; d += kLanes) squares += load(x + d) * load(x + d);
    const float scale = 1.0f / std::sqrt(sum_of(squares) / size + eps);
    for (int d = 0; d < size; d += kLanes)
      out.put(row, d, load(x + d) * scale * load(weight + d));
  });
}

// The halves of every head rotated against each other.
void rotate(const float* heads, int num_heads, int dim, const float* cos, const float* sin,
            float scale, float* out) {
  const int half = dim / 2;
  for (int h = 0; h < num_heads; ++h, heads += dim, out += dim) {
    for (int d = 0; d < half; ++d) {
      const float a = heads[d], b = heads[d + half];
      out[d] = (a * cos[d] - b * sin[d]) * scale;
      out[d + half] = (b * cos[d] + a * sin[d]) * scale;
    }
  }
}

thread_local Buffer inputs, products, roped;

}  // namespace

void begin_layer(ThreadPool& threads, const Layer& layer, int index, const Step& step) {
  const int num_rows = step.num_rows;
  const InputRows normed(inputs, layer.qkv, num_rows);
  normalize(threads, step.hidden, layer.hidden_size(), num_rows, layer.attention_norm, layer.eps,
            normed);
  const int64_t width = round_up(layer.qkv.num_out, kPanel);
  float* qkv = products.take<float>(num_rows * width);
  multiply_rows(threads, normed, num_rows, layer.qkv, &layer.attention_out,
                [&](int64_t row, int column, Vec a, Vec b) {
                  store(qkv + row * width + column, a);
                  store(qkv + row * width + column + kLanes, b);
                });
  const int dim = layer.head_dim;
  const int q_size = layer.num_heads * dim, kv_size = layer.num_kv_heads * dim;
  const float scale = 1.0f / std::sqrt((float)dim);
  for_each_row(threads, num_rows, [&](int64_t row) {
    const float *q = qkv + row * width, *k = q + q_size, *v = k + kv_size;
    const float *c = step.cos + row * dim / 2, *s = step.sin + row * dim / 2;
    rotate(q, layer.num_heads, dim, c, s, scale, step.q + row * q_size);
    float* roped_k = roped.take<float>(kv_size);
    rotate(k, layer.num_kv_heads, dim, c, s, 1.0f, roped_k);
    write_kv(step.pool, index, step.slots[row], roped_k, v);
  });
}

void attend(ThreadPool& threads, const Layer& layer, int index, Step& step) {
  const double started_s = now_s();
  micro_attention(threads,
                  {step.pool, index, step.q, layer.num_heads, step.rows, step.attended});
  step.attention_s += now_s() - started_s;
}

void end_layer(ThreadPool& threads, const Layer& layer, const Matrix* next, const Step& step) {
  const int num_rows = step.num_rows, size = layer.hidden_size();
  const int dim = layer.head_dim, q_size = layer.num_heads * dim;
  const auto add = [&](int64_t row, int column, Vec a, Vec b) {
    float* to = step.hidden + row * size + column;
    store(to, load(to) + a);
    if (column + kLanes < size) store(to + kLanes, load(to + kLanes) + b);
  };
  {
    const InputRows rows(inputs, layer.attention_out, num_rows);
    for_each_row(threads, num_rows, [&](int64_t row) {
      const Partial attended = step.attended.at(row * layer.num_heads, dim);
      for (int h = 0; h < layer.num_heads; ++h)
        finalize_head(attended.acc + h * dim, attended.sum[h], dim, attended.acc + h * dim);
      for (int d = 0; d < q_size; d += kLanes) rows.put(row, d, load(attended.acc + d));
    });
    multiply_rows(threads, rows, num_rows, layer.attention_out, &layer.gate_up, add);
  }
  const InputRows normed(inputs, layer.gate_up, num_rows);
  normalize(threads, step.hidden, size, num_rows, layer.mlp_norm, layer.eps, normed);
  const InputRows inner(products, layer.down, num_rows);
  multiply_rows(threads, normed, num_rows, layer.gate_up, &layer.down,
                [&](int64_t row, int column, Vec gate, Vec up) {
                  inner.put(row, column / 2, silu(gate) * up);
                });
  multiply_rows(threads, inner, num_rows, layer.down, next, add);
}

namespace {

// Longer than two wake-ups of a process cost, shorter than what a busy creditor takes.
constexpr double kSpinS = 100e-6;

bool ask(WiredPart& part, const Layer& layer, int index, const Step& step) {
  const int64_t size = int64_t(layer.num_heads) * layer.head_dim;
  for (int64_t i = 0; i < part.num_rows; ++i)
    std::copy_n(step.q + part.row_ids[i] * size, size, part.query + i * size);
  return send_message(part.wire, index, part.query,
                      part.query_bytes(layer.num_heads, layer.head_dim));
}

bool merge_answer(WiredPart& part, const Layer& layer, int index, const Step& step) {
  const int heads = layer.num_heads, dim = layer.head_dim;
  if (!receive_message(part.wire, index, part.partial, part.partial_bytes(heads, dim), kSpinS, 0))
    return false;
  const Partial answer = part.answer(heads, dim);
  for (int64_t i = 0; i < part.num_rows; ++i)
    for (int h = 0; h < heads; ++h)
      merge_head(step.attended.at(part.row_ids[i] * heads + h, dim), answer.at(i * heads + h, dim),
                 dim);
  return true;
}

}  // namespace

int run_layers(ThreadPool& threads, const Layer* layers, int num_layers, Step& step,
               WiredPart* parts, int num_parts) {
  for (int i = 0; i < num_layers; ++i) {
    begin_layer(threads, layers[i], i, step);
    for (int p = 0; p < num_parts; ++p)
      if (!ask(parts[p], layers[i], i, step)) return p;
    attend(threads, layers[i], i, step);
    for (int p = 0; p < num_parts; ++p)
      if (!merge_answer(parts[p], layers[i], i, step)) return p;
    end_layer(threads, layers[i], i + 1 < num_layers ? &layers[i + 1].qkv : nullptr, step);
  }
  return -1;
}

void answer_layers(ThreadPool& threads, const Pool& pool, const PagedRows& rows, int num_heads,
                   WiredPart& part, int first, int num_layers, double patience_s) {
  const int dim = pool.head_dim;
  for (int i = first; i < num_layers; ++i) {
    const size_t size = part.query_bytes(num_heads, dim);
    if (!receive_message(part.wire, i, part.query, size, 0, patience_s)) return;
    micro_attention(threads, {pool, i, part.query, num_heads, rows, part.answer(num_heads, dim)});
    if (!send_message(part.wire, i, part.partial, part.partial_bytes(num_heads, dim))) return;
  }
}

void compute_logits(ThreadPool& threads, const float* norm, float eps, const Matrix& head,
                    const float* hidden, int num_rows, float* out) {
  const InputRows normed(inputs, head, num_rows);
  normalize(threads, hidden, head.num_in, num_rows, norm, eps, normed);
  const auto put = [&](int64_t row, int column, Vec x) {
    float* to = out + row * head.num_out + column;
    const int n = head.num_out - column;
    if (n >= kLanes) return store(to, x);
    for (int i = 0; i < n; ++i) to[i] = x[i];
  };
  multiply_rows(threads, normed, num_rows, head, nullptr, [&](int64_t row, int column, Vec a, Vec b) {
    put(row, column, a);
    put(row, column + kLanes, b);
  });
}

void find_likeliest(ThreadPool& threads, const float* rows, int num_rows, int size, int64_t* out) {
  threads.run(num_rows, [&](int64_t row) {
    const float* x = rows + row * size;
    Vec top = splat(-INFINITY);
    IntVec at{}, index{};
    for (int i = 0; i < kLanes; ++i) index[i] = i;
    int i = 0;
    for (; i + kLanes <= size; i += kLanes, index += kLanes) {
      const Vec v = load(x + i);
      const IntVec is_greater = v > top;
      top = is_greater ? v : top;
      at = is_greater ? index : at;
    }
    float greatest = -INFINITY;
    int64_t found = 0;
    for (int lane = 0; lane < kLanes; ++lane)
      if (top[lane] > greatest || (top[lane] == greatest && at[lane] < found))
        greatest = top[lane], found = at[lane];
    for (; i < size; ++i)
      if (x[i] > greatest) greatest = x[i], found = i;
    out[row] = found;
  });
}

}  // namespace illm
