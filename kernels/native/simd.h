// Vectors of float as wide as the target's registers, and the few operations the kernels need.
// Written with compiler vector extensions, so that one source serves AVX-512, AVX2 and NEON.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace illm {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

using Half = _Float16;
typedef float Vec __attribute__((vector_size(kLanes * sizeof(float))));
typedef int IntVec __attribute__((vector_size(kLanes * sizeof(int))));

// bfloat16: the upper half of a float.
struct Brain {
  uint16_t bits;

  Brain() = default;
  explicit Brain(float x) {
    uint32_t b;
    std::memcpy(&b, &x, sizeof b);
    bits = uint16_t((b + 0x7fff + (b >> 16 & 1)) >> 16);  // to the nearest, ties to even
  }
  explicit operator float() const {
    const uint32_t b = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &b, sizeof x);
    return x;
  }
};
typedef uint16_t ShortVec __attribute__((vector_size(kLanes * sizeof(uint16_t))));
typedef uint32_t WordVec __attribute__((vector_size(kLanes * sizeof(uint32_t))));

inline Vec splat(float x) { return x - Vec{}; }

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline Vec load(const Half* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX__) && defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = (float)p[i];
  return v;
#endif
}

inline Vec load(const Brain* p) {
#if defined(__AVX512F__)
  const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return (Vec)_mm512_slli_epi32(words, 16);
#else
  ShortVec bits;
  std::memcpy(&bits, p, sizeof bits);
  return (Vec)(__builtin_convertvector(bits, WordVec) << 16);
#endif
}

// The first n lanes from memory, zero in the others.
template <class T>
inline Vec load_some(const T* p, int n) {
  if (n >= kLanes) return load(p);
  Vec v{};
  for (int i = 0; i < n; ++i) v[i] = (float)p[i];
  return v;
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

inline void store(Brain* p, Vec v) {
#if defined(__AVX512BF16__)
  const __m256bh bits = _mm512_cvtneps_pbh((__m512)v);
#else
  const WordVec b = (WordVec)v;
  const ShortVec bits = __builtin_convertvector((b + 0x7fff + (b >> 16 & 1)) >> 16, ShortVec);
#endif
  std::memcpy(p, &bits, sizeof bits);
}

inline Vec max(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

template <int... I>
inline Vec shuffle(Vec a, Vec b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, I...);
#else
  return __builtin_shuffle(a, b, IntVec{I...});
#endif
}

template <int S, int... J>
inline void exchange(Vec& a, Vec& b, std::integer_sequence<int, J...>) {
  const Vec low = shuffle<((J & S) ? kLanes + J - S : J)...>(a, b);
  b = shuffle<((J & S) ? kLanes + J : J + S)...>(a, b);
  a = low;
}

// Transposes a kLanes x kLanes tile held in registers.
template <int S = kLanes / 2>
inline void transpose(Vec (&rows)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i)
    if (!(i & S)) exchange<S>(rows[i], rows[i + S], std::make_integer_sequence<int, kLanes>{});
  if constexpr (S > 1) transpose<S / 2>(rows);
}

struct Plus {
  Vec operator()(Vec a, Vec b) const { return a + b; }
};

struct Max {
  Vec operator()(Vec a, Vec b) const { return max(a, b); }
};

// Joins the halves of every run of S lanes of a, then of b: n folds of 2n vectors, S halved each
// round, end in one vector of what joins the lanes of kLanes vectors, in order.
template <int S, class Join, int... J>
inline Vec fold(Vec a, Vec b, const Join& join, std::integer_sequence<int, J...>) {
  constexpr int half = S / 2;
  return join(shuffle<(J / half * S + J % half)...>(a, b),
              shuffle<(J / half * S + J % half + half)...>(a, b));
}

template <int N, int S, class Join>
inline Vec fold_all(const Vec (&v)[N], const Join& join) {
  if constexpr (N == 1) {
    return v[0];
  } else {
    Vec folded[N / 2];
#pragma GCC unroll 8
    for (int i = 0; i < N / 2; ++i)
      folded[i] = fold<S>(v[2 * i], v[2 * i + 1], join, std::make_integer_sequence<int, kLanes>{});
    return fold_all<N / 2, S / 2>(folded, join);
  }
}

template <int S, int... J>
inline Vec rotate(Vec v, std::integer_sequence<int, J...>) {
  return shuffle<(J ^ S)...>(v, v);
}

template <int S = kLanes / 2>
inline float max_of(Vec v) {
  v = max(v, rotate<S>(v, std::make_integer_sequence<int, kLanes>{}));
  if constexpr (S > 1) return max_of<S / 2>(v);
  return v[0];
}

template <int S = kLanes / 2>
inline float sum_of(Vec v) {
  v = v + rotate<S>(v, std::make_integer_sequence<int, kLanes>{});
  if constexpr (S > 1) return sum_of<S / 2>(v);
  return v[0];
}

// exp(x) for x <= 0, to about one part in 10^7; exactly 0 where float32 would be denormal, and at
// -inf.
#if defined(__AVX512F__)

// 2^n times the series of 2^r.
inline Vec exp_nonpositive(Vec x) {
  const __mmask16 counts = _mm512_cmp_ps_mask((__m512)x, (__m512)splat(-87.3f), _CMP_GE_OQ);
  const Vec n = (Vec)_mm512_roundscale_ps((__m512)(x * 1.44269502f), 0);
  const Vec r = x * 1.44269502f - n + x * 1.92596299e-8f;
  Vec y = splat(1.54035304e-4f);
  y = y * r + 1.33335581e-3f;
  y = y * r + 9.61812911e-3f;
  y = y * r + 5.55041087e-2f;
  y = y * r + 2.40226507e-1f;
  y = y * r + 6.93147181e-1f;
  y = y * r + 1.0f;
  return (Vec)_mm512_maskz_scalef_ps(counts, (__m512)y, (__m512)n);
}

#else

// 2^n times a polynomial in the rest (coefficients of Cephes' expf).
inline Vec exp_nonpositive(Vec x) {
  const Vec lowest = splat(-87.3f);
  const IntVec vanishes = x < lowest;
  x = vanishes ? lowest : x;
  const Vec rounding = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec n = (x * 1.44269504f + rounding) - rounding;
  const Vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Vec y = splat(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const IntVec exponent = (__builtin_convertvector(n, IntVec) + 127) << 23;
  return vanishes ? Vec{} : y * (Vec)exponent;
}

#endif

#if defined(__AVX512F__)

// 2^x for x <= 0, to one part in 10^4, a twentieth of what rounding to bfloat16 loses; exactly 0
// where float32 would be denormal, and at -inf.
inline Vec exp2_coarse(Vec x) {
  const __mmask16 counts = _mm512_cmp_ps_mask((__m512)x, (__m512)splat(-126.0f), _CMP_GE_OQ);
  const Vec rounding = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec shifted = x + rounding, r = x - (shifted - rounding);
  Vec y = splat(5.5171570e-2f);
  y = y * r + 2.4261111e-1f;
  y = y * r + 6.9326100e-1f;
  y = y * r + 9.9992807e-1f;
  const __m512i exponent = _mm512_slli_epi32((__m512i)shifted, 23);
  return (Vec)_mm512_maskz_add_epi32(counts, (__m512i)y, exponent);
}

#endif

inline Vec silu(Vec x) {
  const Vec e = exp_nonpositive(x < 0.0f ? x : -x);
  return x * (x < 0.0f ? e : splat(1.0f)) / (e + 1.0f);
}

constexpr int kCacheLine = 64;

// A burst of prefetches overflows the fill buffers, so each step of a loop asks for a little.
template <class T>
inline void prefetch(const T* rows, int num_elements) {
  const char* p = reinterpret_cast<const char*>(rows);
  for (int i = 0; i < num_elements * (int)sizeof(T); i += kCacheLine)
    __builtin_prefetch(p + i, 0, 2);
}

}  // namespace illm
