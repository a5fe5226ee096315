#include "blocks.h"

#include "amx.h"

namespace illm {
namespace {

constexpr int kNibblesPerWord = 8;

// Where the number of input k and output c lies among those of a panel's block. Words of 4-bit
// numbers hold inputs that follow each other; in tiles every other one, since a tile's rows are
// pairs of inputs.
int index_of(const Blocks& blocks, int k, int c) {
  if (!blocks.is_tiles) {
    if (blocks.num_bits == 8) return k * kPanel + c;
    return (k / kNibblesPerWord * kPanel + c) * kNibblesPerWord + k % kNibblesPerWord;
  }
  const int tile = c / kTileRows * kTileSize, pair = k / 2, in_pair = c % kTileRows * 2 + k % 2;
  if (blocks.num_bits == 8) return tile + pair * kTileDepth + in_pair;
  return tile + (pair / kNibblesPerWord * kTileDepth + in_pair) * kNibblesPerWord +
         pair % kNibblesPerWord;
}

// In a GGUF file the first 16 numbers of 4 bits are the lower halves of the bytes.
uint8_t number_at(const Blocks& blocks, const uint8_t* numbers, int k) {
  if (blocks.num_bits == 8) return numbers[k];
  return k < kBlock / 2 ? numbers[k] & 15 : numbers[k - kBlock / 2] >> 4;
}

void pack_row(const Blocks& blocks, const uint8_t* block, int c, uint8_t* to) {
  uint8_t* scales = to + kPanel * blocks.numbers_bytes();
  std::memcpy(scales + c * sizeof(Half), block, sizeof(Half));
  block += sizeof(Half);
  if (blocks.has_min) {
    std::memcpy(scales + (kPanel + c) * sizeof(Half), block, sizeof(Half));
    block += sizeof(Half);
  }
  for (int k = 0; k < kBlock; ++k) {
    const int i = index_of(blocks, k, c), number = number_at(blocks, block, k);
    if (blocks.num_bits == 8) {
      to[i] = number;
    } else {
      to[i / 2] |= number << i % 2 * 4;
    }
  }
}

using ByteVec = int8_t __attribute__((vector_size(kLanes)));

// The numbers of input k and kLanes outputs, as float.
Vec numbers_at(const Blocks& blocks, const uint8_t* numbers, int k, int c) {
  if (blocks.num_bits == 8) {
    ByteVec bytes;
    std::memcpy(&bytes, numbers + index_of(blocks, k, c), sizeof bytes);
    return __builtin_convertvector(bytes, Vec);
  }
  const int in_word = k % kNibblesPerWord;
  WordVec words;
  std::memcpy(&words, numbers + index_of(blocks, k - in_word, c) / 2, sizeof words);
  return __builtin_convertvector((IntVec)(words >> in_word * 4 & 15), Vec);
}

void expand_rows(const Blocks& blocks, const uint8_t* from, Brain* to) {
  const Half* scales = reinterpret_cast<const Half*>(from + kPanel * blocks.numbers_bytes());
  for (int c = 0; c < kPanel; c += kLanes) {
    const Vec scale = load(scales + c);
    const Vec least = blocks.has_min ? load(scales + kPanel + c) : Vec{};
    for (int k = 0; k < kBlock; ++k)
      store(to + k * kPanel + c, numbers_at(blocks, from, k, c) * scale + least);
  }
}

#if ILLM_HAS_AMX

// 16 numbers by output; each twice, for the pairs of inputs of the lower and the upper 8 outputs.
struct Doubled {
  __m512 lower, upper;

  explicit Doubled(const uint8_t* halves) {
    const __m512i first = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    const __m512 x = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)halves));
    lower = _mm512_permutexvar_ps(first, x);
    upper = _mm512_permutexvar_ps(_mm512_or_si512(first, _mm512_set1_epi32(8)), x);
  }
};

void store_pairs(Brain* to, __m512 lower, __m512 upper) {
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(upper, lower));
}

void expand_four_bits(const uint8_t* numbers, const uint8_t* scales, const uint8_t* mins,
                      Brain* to) {
  // A look-up takes the place of masking and conversion: it minds the lowest 4 bits only.
  const __m512 floats =
      _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const Doubled scale(scales), least(mins);
  for (int half = 0; half < 2; ++half, numbers += 128) {
    const __m512i lower = _mm512_loadu_si512(numbers), upper = _mm512_loadu_si512(numbers + 64);
#pragma GCC unroll 8
    for (int i = 0; i < kNibblesPerWord; ++i, to += kTileDepth) {
      const __m512 a = _mm512_permutexvar_ps(_mm512_srli_epi32(lower, 4 * i), floats);
      const __m512 b = _mm512_permutexvar_ps(_mm512_srli_epi32(upper, 4 * i), floats);
      store_pairs(to, _mm512_fmadd_ps(a, scale.lower, least.lower),
                  _mm512_fmadd_ps(b, scale.upper, least.upper));
    }
  }
}

void expand_eight_bits(const uint8_t* numbers, const uint8_t* scales, Brain* to) {
  const Doubled scale(scales);
  const auto load_floats = [](const uint8_t* at) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at)));
  };
#pragma GCC unroll 16
  for (int i = 0; i < kTileRows; ++i, numbers += kTileDepth, to += kTileDepth)
    store_pairs(to, _mm512_mul_ps(load_floats(numbers), scale.lower),
                _mm512_mul_ps(load_floats(numbers + 16), scale.upper));
}

void expand_tiles(const Blocks& blocks, const uint8_t* from, Brain* to) {
  const uint8_t* scales = from + kPanel * blocks.numbers_bytes();
  for (int c = 0; c < kPanel; c += kTileRows, to += kTileSize) {
    const uint8_t* numbers = from + c * blocks.numbers_bytes();
    const uint8_t* scale = scales + c * sizeof(Half);
    if (blocks.has_min) {
      expand_four_bits(numbers, scale, scale + kPanel * sizeof(Half), to);
    } else {
      expand_eight_bits(numbers, scale, to);
    }
  }
}

#endif

}  // namespace

void pack_blocks(const Blocks& blocks, const void* const (&rows)[kPanel], int num_in,
                 uint8_t* panel) {
  for (int block = 0; block < num_in / kBlock; ++block, panel += blocks.panel_bytes()) {
    std::memset(panel, 0, blocks.panel_bytes());
    for (int c = 0; c < kPanel; ++c)
      if (rows[c])
        pack_row(blocks, static_cast<const uint8_t*>(rows[c]) + block * blocks.row_bytes(), c,
                 panel);
  }
}

void expand_block(Format format, const uint8_t* from, Brain* to) {
  switch (format) {
    case kFourBits:
    case kEightBits: return expand_rows(Blocks(format), from, to);
#if ILLM_HAS_AMX
    case kFourBitTiles:
    case kEightBitTiles: return expand_tiles(Blocks(format), from, to);
#endif
    default: return;
  }
}

}  // namespace illm
