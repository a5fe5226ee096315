// Weights of 4 or 8 bits in blocks of 32 inputs that share a scale, as GGUF's Q4_1 and Q8_0 have
// them. They stay so in memory; a product expands them, panel by panel, to what it multiplies with
// and gets bit by bit what it gets of bfloat16 weights.
#pragma once

#include <cstdint>

#include "pool.h"
#include "tile.h"

namespace illm {

constexpr int kBlock = 32;  // inputs

// What a format's blocks hold.
struct Blocks {
  int num_bits = 0;  // of a number; 0 where the format has no blocks
  bool has_min = false;
  bool is_tiles = false;

  explicit Blocks(Format format) : is_tiles(format >= kBrainTiles) {
    if (format == kFourBits || format == kFourBitTiles) num_bits = 4, has_min = true;
    if (format == kEightBits || format == kEightBitTiles) num_bits = 8;
  }

  int numbers_bytes() const { return kBlock * num_bits / 8; }
  // Of one output: its scale, its least number if any, its numbers.
  int row_bytes() const { return sizeof(Half) * (1 + has_min) + numbers_bytes(); }
  // Of all outputs of a panel: the numbers, then kPanel scales, then kPanel least numbers.
  int panel_bytes() const { return kPanel * row_bytes(); }
};

// rows[c] are the blocks of output c one after the other, as in a GGUF file, or null.
void pack_blocks(const Blocks& blocks, const void* const (&rows)[kPanel], int num_in,
                 uint8_t* panel);

// The block at `from` of a panel, as its part of a panel of kBrain or kBrainTiles.
void expand_block(Format format, const uint8_t* from, Brain* to);

}  // namespace illm
