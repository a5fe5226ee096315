// Weights laid out in the order in which a product reads them: panels of kPanel outputs, each one
// run of memory.
#pragma once

#include <cstdint>

#include "blocks.h"
#include "pool.h"
#include "thread_pool.h"
#include "tile.h"

namespace illm {

// A panel holds [num_in][kPanel] of its format's type, or [num_in / 32] blocks.
// Mirrored by kernels/native/library.py.
struct Matrix {
  void* data;
  int32_t num_out, num_in, format;

  int num_panels() const { return (num_out + kPanel - 1) / kPanel; }
  Blocks blocks() const { return Blocks((Format)format); }
  bool is_blocks() const { return blocks().num_bits > 0; }
  bool is_tiles() const { return blocks().is_tiles; }
  int64_t panel_bytes() const;
  void* panel(int p) const { return static_cast<char*>(data) + p * panel_bytes(); }
};

// The rows of first; or, where there is a second, of both by turns, kLanes of each: a panel then
// holds what belongs together. num_out counts both, and is whole panels. Rows are of float or, for
// formats in blocks, of GGUF's blocks.
void pack(ThreadPool& threads, const Matrix& matrix, const void* first, const void* second);

}  // namespace illm
