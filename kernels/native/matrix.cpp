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

void pack_as(Format format, const float* const (&rows)[kPanel], int num_in, void* panel) {
  switch (format) {
    case kFloat: return pack_panel(rows, num_in, static_cast<float*>(panel));
    case kHalf: return pack_panel(rows, num_in, static_cast<Half*>(panel));
    case kBrain: return pack_panel(rows, num_in, static_cast<Brain*>(panel));
    case kBrainTiles: return pack_tiles(rows, num_in, static_cast<Brain*>(panel));
  }
}

}  // namespace

int64_t Matrix::panel_bytes() const {
  const int64_t depth = format == kBrainTiles ? round_up(num_in, kTileDepth) : num_in;
  return depth * kPanel * (format == kFloat ? sizeof(float) : sizeof(Half));
}

void pack(ThreadPool& threads, const Matrix& matrix, const float* first, const float* second) {
  threads.run(matrix.num_panels(), [&](int p) {
    const float* rows[kPanel];
    for (int c = 0; c < kPanel; ++c) {
      const float* from = second && c >= kLanes ? second : first;
      const int64_t row = second ? p * kLanes + c % kLanes : p * kPanel + c;
      rows[c] = second || row < matrix.num_out ? from + row * matrix.num_in : nullptr;
    }
    pack_as((Format)matrix.format, rows, matrix.num_in, matrix.panel(p));
  });
}

}  // namespace illm
