// What surrounds the attention in a layer of the Llama family, over packed rows.
#pragma once

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

struct Heads {
  float *q, *k, *v;  // [rows, heads, head_dim] each
};

// hidden [rows, hidden_size]; cos and sin [rows, head_dim / 2] of the rows' positions.
void before_attention(ThreadPool& threads, const Layer& layer, const float* hidden, int num_rows,
                      const float* cos, const float* sin, const Heads& out);

// attended [rows, num_heads * head_dim]; adds to hidden.
void after_attention(ThreadPool& threads, const Layer& layer, float* hidden, int num_rows,
                     const float* attended);

// out [rows, head.num_out]
void compute_logits(ThreadPool& threads, const float* norm, float eps, const Matrix& head,
                    const float* hidden, int num_rows, float* out);

}  // namespace illm
