// The layers of a decoder of the Llama family over the packed rows of one step.
#pragma once

#include "api.h"
#include "matrix.h"

namespace illm {

// Mirrored by kernels/native/library.py.
struct Layer {
  const float* attention_norm;
  const float* mlp_norm;
  Matrix qkv, attention_out, gate_up, down;
  int32_t num_heads, num_kv_heads, head_dim;
  float eps;

  int hidden_size() const { return qkv.num_in; }
};

// Mirrored by kernels/native/library.py.
struct Step {
  float* hidden;           // [rows, hidden_size]
  const float *cos, *sin;  // [rows, head_dim / 2], of the rows' positions
  float* q;                // [rows, num_heads, head_dim], scaled; of the layer at hand
  Partial attended;        // of the layer at hand, over what lies here
  const int64_t* slots;    // [rows]: where their K and V go
  PagedRows rows;          // what they attend to here
  Pool pool;
  int32_t num_rows;
  double attention_s;  // spent in `attend` so far
};

// A layer up to its queries: K and V are written.
void begin_layer(ThreadPool& threads, const Layer& layer, int index, const Step& step);

// The layer's queries over the pool; others may add what they hold afterwards.
void attend(ThreadPool& threads, const Layer& layer, int index, Step& step);

// The rest of the layer, up to its hidden states. `next` is the product that will follow, or null.
void end_layer(ThreadPool& threads, const Layer& layer, const Matrix* next, const Step& step);

void run_layers(ThreadPool& threads, const Layer* layers, int num_layers, Step& step);

// out [rows, head.num_out]
void compute_logits(ThreadPool& threads, const float* norm, float eps, const Matrix& head,
                    const float* hidden, int num_rows, float* out);

// The index of the greatest of each row's `size` numbers, the first of equals; NaNs are passed over.
void find_likeliest(ThreadPool& threads, const float* rows, int num_rows, int size, int64_t* out);

}  // namespace illm
