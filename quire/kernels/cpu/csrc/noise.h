// Counter-based noise: Philox4x32-10 (Salmon et al., Parallel random numbers, SC 2011), Gumbel variates of its words.
#pragma once
#include "simd.h"

namespace quire::ISA {

// Products of the lower halves of lanes with m.
INLINE ULongs multiply(ULongs a, uint32_t m) {
#if defined(__AVX512F__)
  return (ULongs)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(m));
#elif defined(__AVX2__)
  return (ULongs)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(m));
#elif defined(__SSE2__)
  return (ULongs)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(m));
#else
  return (a & 0xffffffffu) * m;
#endif
}
template <class H>
INLINE Pair<H> multiply(Pair<H> a, uint32_t m) {
  return {multiply(a.low, m), multiply(a.high, m)};
}

// The words of 8 counters: the lower half of lane i of words[j] is word j of counter i. The upper half is undefined.
struct Words {
  ULVec words[4];
};

// The counter (position, sample index, 0, quad): 0 is Purpose.SAMPLE, a quad is four tokens.
struct Philox {
  uint32_t position, sample_index, key[2];

  INLINE Words of(const Philox& p, int64_t first_quad) {
    static const uint64_t numbers[] = {0, 1, 2, 3, 4, 5, 6, 7};
    ULVec c0 = ULVec{} + p.position, c1 = ULVec{} + p.sample_index, c2{};
    ULVec c3 = load_bits<ULVec>(numbers) + (uint64_t)first_quad;
    uint32_t k0 = p.key[0], k1 = p.key[1];
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
      ULVec first = multiply(c0, 0xD2511F53), second = multiply(c2, 0xCD9E8D57);
      c0 = (second >> 32) ^ c1 ^ (uint64_t)k0;
      c2 = (first >> 32) ^ c3 ^ (uint64_t)k1;
      c1 = second;
      c3 = first;
      k0 += 0x9E3779B9;
      k1 += 0xBB67AE85;
    }
    return {{c0, c1, c2, c3}};
  }
};

// The natural logarithm of normal numbers above 0, within 2 units in the last place (method and coefficients of
// Moshier, Methods and Programs for Mathematical Functions, 1989).
INLINE Vec log(Vec x) {
  IVec bits = (IVec)x;
  IVec exponent = (bits >> 23) - 126;
  Vec m = (Vec)((bits & 0x7fffff) | 0x3f000000);  // in [0.5, 1)
  IVec small = m < 0.70710678f;
  exponent += small;
  m = m - 1.0f + (Vec)((IVec)m & small);
  Vec e = to_floats(exponent), z = m * m;
  Vec p = splat(7.0376836292e-2f);
  p = fma(p, m, splat(-1.1514610310e-1f));
  p = fma(p, m, splat(1.1676998740e-1f));
  p = fma(p, m, splat(-1.2420140846e-1f));
  p = fma(p, m, splat(1.4249322787e-1f));
  p = fma(p, m, splat(-1.6668057665e-1f));
  p = fma(p, m, splat(2.0000714765e-1f));
  p = fma(p, m, splat(-2.4999993993e-1f));
  p = fma(p, m, splat(3.3333331174e-1f));
  p = p * m * z;
  p = fma(e, splat(-2.12194440e-4f), p) - splat(0.5f) * z;
  return fma(e, splat(0.693359375f), m + p);
}

// -log(-log(u)) with u = (word + 0.5) / 2^32. In the upper half 1 - u is more exact than u: the rounding error of u is
// added to its logarithm.
INLINE Vec gumbel(UVec words) {
  IVec upper = (IVec)words < 0;
  Vec share = (to_floats((IVec)words ^ upper) + 0.5f) * 0x1p-32f;  // from the nearer end of the range
  Vec u = select(upper, splat(1.0f) - share, share);
  Vec lost = (splat(1.0f) - u - share) / u;
  return -log(-(log(u) + (Vec)((IVec)lost & upper)));
}
constexpr float LARGEST_GUMBEL = 23;  // upper bound; the largest value is 22.9

}  // namespace quire::ISA
