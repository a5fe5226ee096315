// The paper's (MA, m, e) of a run of rows, its merge and its end (equation 3).
#pragma once

#include <cmath>
#include <cstdint>

namespace illm {

struct Partial {
  float* acc;  // [rows, heads, dim]
  float* max;  // [rows, heads]
  float* sum;  // [rows, heads]

  Partial at(int64_t head, int64_t dim) const { return {acc + head * dim, max + head, sum + head}; }
};

// into = into (+) other for one row and head. The scales come first: acc * exp(m) would overflow.
inline void merge_head(Partial into, Partial other, int64_t dim) {
  if (*other.max == -INFINITY) return;
  const float max = *into.max > *other.max ? *into.max : *other.max;
  const float mine = *into.max == -INFINITY ? 0.0f : std::exp(*into.max - max);
  const float theirs = std::exp(*other.max - max);
  for (int64_t d = 0; d < dim; ++d) into.acc[d] = into.acc[d] * mine + other.acc[d] * theirs;
  *into.sum = *into.sum * mine + *other.sum * theirs;
  *into.max = max;
}

// out [dim] = acc / sum of one row and head, zero where the part is empty (equation 3, last line).
// It may be acc itself.
inline void finalize_head(const float* acc, float sum, int64_t dim, float* out) {
  const float scale = sum == 0.0f ? 0.0f : 1.0f / sum;
  for (int64_t d = 0; d < dim; ++d) out[d] = acc[d] * scale;
}

}  // namespace illm
