// The layers of a decoder of the Llama family over the packed rows of one step.
#pragma once

#include "api.h"
#include "matrix.h"
#include "wire.h"

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

// What another process holds of some rows' contexts. Mirrored by kernels/native/library.py.
struct WiredPart {
  Wire wire;
  const int64_t* row_ids;  // which rows of the step
  int32_t num_rows;
  float* query;    // room for theirs: [rows, num_heads, head_dim]
  float* partial;  // and for the answer: acc, max and sum, one after another

  int64_t num_states(int num_heads) const { return int64_t(num_rows) * num_heads; }
  Partial answer(int num_heads, int dim) const {
    float* max = partial + num_states(num_heads) * dim;
    return {partial, max, max + num_states(num_heads)};
  }
  size_t query_bytes(int num_heads, int dim) const {
    return num_states(num_heads) * dim * sizeof(float);
  }
  size_t partial_bytes(int num_heads, int dim) const {
    return num_states(num_heads) * (dim + 2) * sizeof(float);
  }
};

// All layers; each asks the parts before it attends to what lies here, and then merges their
// answers. The part that failed, or -1.
int run_layers(ThreadPool& threads, const Layer* layers, int num_layers, Step& step,
               WiredPart* parts, int num_parts);

// The other end of it: the answers from this pool to layers `first`..`num_layers`-1, until one is
// not asked for within `patience_s` or `part.wire.status` says what else went wrong.
void answer_layers(ThreadPool& threads, const Pool& pool, const PagedRows& rows, int num_heads,
                   WiredPart& part, int first, int num_layers, double patience_s);

// out [rows, head.num_out]
void compute_logits(ThreadPool& threads, const float* norm, float eps, const Matrix& head,
                    const float* hidden, int num_rows, float* out);

// The index of the greatest of each row's `size` numbers, the first of equals; NaNs are passed over.
void find_likeliest(ThreadPool& threads, const float* rows, int num_rows, int size, int64_t* out);

}  // namespace illm
