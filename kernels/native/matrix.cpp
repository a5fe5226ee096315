#include "matrix.h"

#include <algorithm>

#include "amx.h"

namespace illm {
namespace {

template <class T>
void pack_panel(const float* const (&rows)[kPanel], int num_in, T* panel) {
  for (int c = 0; c < kPanel; ++c)
    for (int k = 0; k < num_in; ++k) panel[k * kPanel + c] = rows[c] ? (T)rows[c][k] : (T)0.0f;
}

// [num_in / 32][2][16 pairs of inputs][16 outputs][2]; inputs are filled up with zeros.
void pack_tiles(const float* const (&rows)[kPanel], int num_in, Brain* panel) {
  const int depth = round_up(num_in, kTileDepth);
  for (int c = 0; c < kPanel; ++c) {
    for (int k = 0; k < depth; ++k) {
      const int tile = k / kTileDepth * 2 + c / 16;
      const int at = k % kTileDepth / 2 * kTileDepth + c % 16 * 2 + k % 2;
      panel[tile * kTileSize + at] = Brain(rows[c] && k < num_in ? rows[c][k] : 0.0f);
    }
  }
}

void pack_as(Format format, const void* const (&rows)[kPanel], int num_in, void* panel) {
  if (const Blocks blocks(format); blocks.num_bits)
    return pack_blocks(blocks, rows, num_in, static_cast<uint8_t*>(panel));
  const float* numbers[kPanel];
  for (int c = 0; c < kPanel; ++c) numbers[c] = static_cast<const float*>(rows[c]);
  switch (format) {
    case kFloat: return pack_panel(numbers, num_in, static_cast<float*>(panel));
    case kHalf: return pack_panel(numbers, num_in, static_cast<Half*>(panel));
    case kBrainTiles: return pack_tiles(numbers, num_in, static_cast<Brain*>(panel));
    default: return pack_panel(numbers, num_in, static_cast<Brain*>(panel));
  }
}

}  // namespace

int64_t Matrix::panel_bytes() const {
  if (is_blocks()) return int64_t(num_in / kBlock) * blocks().panel_bytes();
  const int64_t depth = is_tiles() ? round_up(num_in, kTileDepth) : num_in;
  return depth * kPanel * (format == kFloat ? sizeof(float) : sizeof(Half));
}

void pack(ThreadPool& threads, const Matrix& matrix, const void* first, const void* second) {
  const int64_t row_bytes = matrix.is_blocks()
                                ? matrix.num_in / kBlock * matrix.blocks().row_bytes()
                                : matrix.num_in * (int64_t)sizeof(float);
  threads.run(matrix.num_panels(), [&](int p) {
    const void* rows[kPanel];
    for (int c = 0; c < kPanel; ++c) {
      const void* from = second && c >= kLanes ? second : first;
      const int64_t row = second ? p * kLanes + c % kLanes : p * kPanel + c;
      const bool is_there = second || row < matrix.num_out;
      rows[c] = is_there ? static_cast<const char*>(from) + row * row_bytes : nullptr;
    }
    pack_as((Format)matrix.format, rows, matrix.num_in, matrix.panel(p));
  });
}

}  // namespace illm
