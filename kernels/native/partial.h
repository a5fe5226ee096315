// The paper's (MA, m, e) of a run of rows, and its merge (equation 3).
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

}  // namespace illm
