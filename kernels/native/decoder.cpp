#include "decoder.h"

#include <cmath>

#include "amx.h"
#include "buffer.h"
#include "product.h"

namespace illm {
namespace {

constexpr int kRowsPerItem = 16;  // of the work between products

// The rows that a product will read, to be filled with put.
class InputRows {
 public:
  InputRows(Buffer& buffer, const Matrix& matrix, int num_rows)
      : is_brain_(matrix.format == kBrainTiles), num_in_(matrix.num_in) {
    const int depth = round_up(num_in_, kTileDepth);
    // An odd number of cache lines between rows spreads them over the cache.
    stride_ = is_brain_ ? depth + kTileDepth * (1 - depth / kTileDepth % 2) : depth;
    const int64_t size = int64_t(round_up(num_rows, kTileRows)) * stride_;
    data_ = is_brain_ ? (void*)buffer.take<Brain>(size) : (void*)buffer.take<float>(size);
    if (is_brain_ && depth > num_in_)
      for (int i = 0; i < num_rows; ++i)
        std::fill_n(row<Brain>(i) + num_in_, depth - num_in_, Brain(0.0f));
  }

  void put(int64_t i, int column, Vec x) const {
    if (is_brain_) {
      store(row<Brain>(i) + column, x);
    } else {
      store(row<float>(i) + column, x);
    }
  }

  operator Input() const { return {data_, stride_}; }

 private:
  template <class T>
  T* row(int64_t i) const {
    return static_cast<T*>(data_) + i * stride_;
  }

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
            float* out) {
  const int half = dim / 2;
  for (int h = 0; h < num_heads; ++h, heads += dim, out += dim) {
    for (int d = 0; d < half; ++d) {
      const float a = heads[d], b = heads[d + half];
      out[d] = a * cos[d] - b * sin[d];
      out[d + half] = b * cos[d] + a * sin[d];
    }
  }
}

thread_local Buffer inputs, products;

}  // namespace

void before_attention(ThreadPool& threads, const Layer& layer, const float* hidden, int num_rows,
                      const float* cos, const float* sin, const Heads& out) {
  const InputRows normed(inputs, layer.qkv, num_rows);
  normalize(threads, hidden, layer.hidden_size(), num_rows, layer.attention_norm, layer.eps,
            normed);
  const int64_t width = round_up(layer.qkv.num_out, kPanel);
  float* qkv = products.take<float>(num_rows * width);
  multiply_rows(threads, normed, num_rows, layer.qkv, [&](int64_t row, int column, Vec a, Vec b) {
    store(qkv + row * width + column, a);
    store(qkv + row * width + column + kLanes, b);
  });
  const int dim = layer.head_dim;
  const int q_size = layer.num_heads * dim, kv_size = layer.num_kv_heads * dim;
  for_each_row(threads, num_rows, [&](int64_t row) {
    const float* from = qkv + row * width;
    const float *c = cos + row * dim / 2, *s = sin + row * dim / 2;
    rotate(from, layer.num_heads, dim, c, s, out.q + row * q_size);
    rotate(from + q_size, layer.num_kv_heads, dim, c, s, out.k + row * kv_size);
    std::copy_n(from + q_size + kv_size, kv_size, out.v + row * kv_size);
  });
}

void after_attention(ThreadPool& threads, const Layer& layer, float* hidden, int num_rows,
                     const float* attended) {
  const int size = layer.hidden_size(), q_size = layer.attention_out.num_in;
  const auto add = [&](int64_t row, int column, Vec a, Vec b) {
    float* to = hidden + row * size + column;
    store(to, load(to) + a);
    if (column + kLanes < size) store(to + kLanes, load(to + kLanes) + b);
  };
  {
    const InputRows rows(inputs, layer.attention_out, num_rows);
    for_each_row(threads, num_rows, [&](int64_t row) {
      for (int d = 0; d < q_size; d += kLanes) rows.put(row, d, load(attended + row * q_size + d));
    });
    multiply_rows(threads, rows, num_rows, layer.attention_out, add);
  }
  const InputRows normed(inputs, layer.gate_up, num_rows);
  normalize(threads, hidden, size, num_rows, layer.mlp_norm, layer.eps, normed);
  const InputRows inner(products, layer.down, num_rows);
  multiply_rows(threads, normed, num_rows, layer.gate_up,
                [&](int64_t row, int column, Vec gate, Vec up) {
                  inner.put(row, column / 2, silu(gate) * up);
                });
  multiply_rows(threads, inner, num_rows, layer.down, add);
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
  multiply_rows(threads, normed, num_rows, head, [&](int64_t row, int column, Vec a, Vec b) {
    put(row, column, a);
    put(row, column + kLanes, b);
  });
}

}  // namespace illm
