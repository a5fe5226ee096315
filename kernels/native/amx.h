// The matrix unit of recent x86 CPUs (AMX): C[16, 16] float += A[16, 32] B[32, 16] in bfloat16.
#pragma once

#include "simd.h"
#include "tile.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && \
    defined(__linux__)
#define ILLM_HAS_AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#define ILLM_HAS_AMX 0
#endif

namespace illm {

constexpr int kTileRows = 16;   // of A and C
constexpr int kTileDepth = 32;  // of A and B
constexpr int kTileSize = kTileRows * kTileDepth;

// Where an element lies in rows of tiles: [rows / 16][depth / 32][16][32].
inline int64_t tiled_index(int64_t row, int column, int depth) {
  return row / kTileRows * kTileRows * depth + column / kTileDepth * kTileSize +
         row % kTileRows * kTileDepth + column % kTileDepth;
}

#if ILLM_HAS_AMX

// Asks the kernel for leave to use the unit, once per process.
inline bool may_use_amx() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

// Until they are released, this thread's eight tiles are 16 rows of 64 bytes.
inline void configure_tiles() {
  // Static, since compilers believe that the instruction reads a few bytes of it only.
  static const struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  _tile_loadconfig(&config);
}

inline void release_tiles() { _tile_release(); }

// c[16 or 32, kPanel] = a[16 or 32, depth] b; a lies in rows of tiles, b's next [2][tile] where
// pair_at(i) says, i < depth / 32.
template <int RowTiles, class PairAt>
inline void multiply_tiles(const Brain* a, const PairAt& pair_at, int depth, float* c,
                           int c_stride) {
  const Brain* below = a + kTileRows * depth;
  _tile_zero(0);
  _tile_zero(1);
  if (RowTiles == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int i = 0; i < depth / kTileDepth; ++i) {
    const Brain* b = pair_at(i);
    _tile_loadd(6, b, 64);
    _tile_loadd(7, b + kTileSize, 64);
    _tile_loadd(4, a, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (RowTiles == 2) {
      _tile_loadd(5, below, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    a += kTileSize;
    below += kTileSize;
  }
  const int row_bytes = c_stride * (int)sizeof(float);
  _tile_stored(0, c, row_bytes);
  _tile_stored(1, c + kTileRows, row_bytes);
  if (RowTiles == 2) {
    _tile_stored(2, c + kTileRows * c_stride, row_bytes);
    _tile_stored(3, c + kTileRows * c_stride + kTileRows, row_bytes);
  }
}

// The same of a b that lies in [depth / 32][2][tile]. What lies `ahead` of it (in elements) is
// fetched on the way, if anything.
template <int RowTiles>
inline void multiply_tiles(const Brain* a, const Brain* b, int depth, int64_t ahead, float* c,
                           int c_stride) {
  const auto pair_at = [&](int i) {
    const Brain* pair = b + i * 2 * kTileSize;
    if (ahead) prefetch(pair + ahead, 2 * kTileSize);
    return pair;
  };
  multiply_tiles<RowTiles>(a, pair_at, depth, c, c_stride);
}

#else

inline bool may_use_amx() { return false; }

#endif

}  // namespace illm
