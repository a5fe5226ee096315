// Weights laid out in the order in which a product reads them: panels of kPanel outputs, each one
// run of memory.
#pragma once

#include <cstdint>

#include "thread_pool.h"
#include "tile.h"

namespace illm {

// What a panel holds: [num_in][kPanel] of a type, or bfloat16 in tiles of the matrix unit.
enum Format : int32_t { kFloat, kHalf, kBrain, kBrainTiles };

// Mirrored by kernels/native/library.py.
struct Matrix {
  void* data;
  int32_t num_out, num_in, format;

  int num_panels() const { return (num_out + kPanel - 1) / kPanel; }
  int64_t panel_bytes() const;
};

// The rows of first; or, where there is a second, of both by turns, kLanes of each: a panel then
// holds what belongs together. num_out counts both, and is whole panels.
void pack(ThreadPool& threads, const Matrix& matrix, const float* first, const float* second);

}  // namespace illm
