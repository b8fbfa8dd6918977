// Vectors of 16 numbers, for whichever instruction set this file is compiled with.
//
// Everything is in the namespace of the instruction set and inlined: were two builds to share one symbol, the
// linker might keep the code that this machine cannot run.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

namespace quire::ISA {

struct bf16 {
  uint16_t bits;
};

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IVec __attribute__((vector_size(64)));
typedef uint32_t UVec __attribute__((vector_size(64)));
typedef uint16_t HVec __attribute__((vector_size(32)));

constexpr int LANES = 16;

INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE float maxf(float a, float b) { return a > b ? a : b; }
INLINE int64_t up_to(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

INLINE float as_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
INLINE uint32_t as_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

// one number
INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) { return as_float((uint32_t)x.bits << 16); }
INLINE void put(float* target, float x) { *target = x; }
INLINE void put(bf16* target, float x) {  // to the nearest, ties to even; NaN stays NaN
  uint32_t bits = as_bits(x);
  target->bits = x != x ? (uint16_t)((bits >> 16) | 0x40) : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE Vec splat(float x) { return Vec{} + x; }
INLINE IVec splat_int(int32_t x) { return IVec{} + x; }

#if !defined(__AVX512F__)
// Vectors as wide as the machine's: GCC takes comparisons of wider ones to pieces, lane by lane.
#if defined(__AVX2__)
constexpr int NUM_PARTS = 2;
#else
constexpr int NUM_PARTS = 4;
#endif
typedef float Part __attribute__((vector_size(64 / NUM_PARTS)));
struct Parts {
  Part p[NUM_PARTS];
};
INLINE Parts parts(Vec v) {
  Parts out;
  memcpy(&out, &v, 64);
  return out;
}
INLINE Vec whole(Parts parts) {
  Vec out;
  memcpy(&out, &parts, 64);
  return out;
}
#endif

INLINE Vec load(const float* p) {
  Vec v;
  memcpy(&v, p, 64);
  return v;
}
INLINE void store(float* p, Vec v) { memcpy(p, &v, 64); }

#if defined(__AVX2__) && !defined(__AVX512F__)
// GCC takes vectors that are wider than the machine's apart number by number where they change their type.
INLINE Vec two_halves(const __m256i* halves) {
  Vec v;
  memcpy(&v, halves, 64);
  return v;
}
#endif

INLINE Vec widen(HVec h) {
#if defined(__AVX512F__)
  return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
#elif defined(__AVX2__)
  __m256i halves[2];
  for (int i = 0; i < 2; i++)
    halves[i] = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_extracti128_si256((__m256i)h, i)), 16);
  return two_halves(halves);
#else
  return (Vec)(__builtin_convertvector(h, UVec) << 16);
#endif
}
INLINE HVec narrow(Vec v) {  // to bf16
#if defined(__AVX512BF16__)
  return (HVec)_mm512_cvtneps_pbh((__m512)v);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  __m256i halves[2];
  memcpy(halves, &v, 64);
  for (int i = 0; i < 2; i++) {
    __m256i bits = halves[i], high = _mm256_srli_epi32(bits, 16);
    __m256i up = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), _mm256_and_si256(high, _mm256_set1_epi32(1)));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, up), 16);
    __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    __m256 is_nan = _mm256_cmp_ps((__m256)bits, (__m256)bits, _CMP_UNORD_Q);
    halves[i] = _mm256_blendv_epi8(rounded, quiet, (__m256i)is_nan);
  }
  return (HVec)_mm256_permute4x64_epi64(_mm256_packus_epi32(halves[0], halves[1]), 0xd8);
#else
  UVec bits = (UVec)v;
  UVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  UVec quiet = (bits >> 16) | 0x40;
  UVec is_nan = (UVec)(v != v);
  return __builtin_convertvector((rounded & ~is_nan) | (quiet & is_nan), HVec);
#endif
}
INLINE Vec load(const bf16* p) {
  HVec h;
  memcpy(&h, p, 32);
  return widen(h);
}
INLINE void store(bf16* p, Vec v) {
  HVec h = narrow(v);
  memcpy(p, &h, 32);
}

INLINE void store_two(bf16* p, Vec first, Vec second) {
#if defined(__AVX512BF16__)
  _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#else
  store(p, first);
  store(p + LANES, second);
#endif
}

// the first n of 16 numbers; the others are 0, and are not written
template <class T>
INLINE Vec load_some(const T* p, int64_t n) {
  if (n >= LANES) return load(p);
  T all[LANES] = {};
  memcpy(all, p, n * sizeof(T));
  return load(all);
}
template <class T>
INLINE void store_some(T* p, Vec v, int64_t n) {
  if (n >= LANES) return store(p, v);
  T all[LANES];
  store(all, v);
  memcpy(p, all, n * sizeof(T));
}

INLINE Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;  // contracted where the machine can
#endif
}
INLINE Vec select(IVec mask, Vec a, Vec b) {  // lanes of mask are 0 or -1
#if defined(__AVX512F__)
  return (Vec)_mm512_mask_blend_ps(_mm512_movepi32_mask((__m512i)mask), (__m512)b, (__m512)a);
#else
  return (Vec)(((IVec)a & mask) | ((IVec)b & ~mask));
#endif
}
INLINE Vec vmax(Vec a, Vec b) {  // b where either is NaN
#if defined(__AVX512F__)
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
  Parts x = parts(a), y = parts(b);
  for (int i = 0; i < NUM_PARTS; i++) x.p[i] = x.p[i] > y.p[i] ? x.p[i] : y.p[i];
  return whole(x);
#endif
}
INLINE Vec vmin(Vec a, Vec b) {  // b where either is NaN
#if defined(__AVX512F__)
  return (Vec)_mm512_min_ps((__m512)a, (__m512)b);
#else
  Parts x = parts(a), y = parts(b);
  for (int i = 0; i < NUM_PARTS; i++) x.p[i] = x.p[i] < y.p[i] ? x.p[i] : y.p[i];
  return whole(x);
#endif
}
// Sums and maxima of the lanes, in an order that is the same on every machine.
INLINE float sum(Vec v) {
  float x[LANES];
  memcpy(x, &v, 64);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) x[i] += x[i + width];
  return x[0];
}
INLINE float largest(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float x[LANES];
  memcpy(x, &v, 64);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) x[i] = maxf(x[i], x[i + width]);
  return x[0];
#endif
}
INLINE Vec round_to_int(Vec x) {
#if defined(__AVX512F__)
  return (Vec)_mm512_roundscale_ps((__m512)x, 8);
#else
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: the sum has no room for fractions
  return (x + magic) - magic;
#endif
}
// 1 / x for finite x above 0 that are no denormals, within 2 units in the last place
INLINE Vec reciprocal(Vec x) {
#if defined(__AVX512F__)
  Vec r = (Vec)_mm512_rcp14_ps((__m512)x);
  return r * fma(-x, r, splat(2.0f));
#else
  return splat(1.0f) / x;
#endif
}
// e^x within 2 units in the last place between -87 and 88; beyond, what it is there.
INLINE Vec exp(Vec x) {
  x = vmax(splat(-87.0f), vmin(splat(88.0f), x));  // in this order, NaN stays NaN
  Vec n = round_to_int(x * splat(1.44269504f));
  Vec r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  Vec p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
  IVec exponent = __builtin_convertvector(n, IVec);
  return p * (Vec)((exponent + 127) << 23);
}
INLINE Vec tanh(Vec x) {
  Vec e = exp(splat(2.0f) * vmax(vmin(x, splat(15.0f)), splat(-15.0f)));
  return (e - 1.0f) / (e + 1.0f);
}

// Pairs of bf16: acc[i] + a.low * w[2i] + a.high * w[2i + 1].
INLINE Vec dot_pairs(Vec acc, uint32_t a, UVec w) {
#if defined(__AVX512BF16__)
  return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)w);
#else
  acc = fma(splat(as_float(a << 16)), (Vec)(w << 16), acc);
  return fma(splat(as_float(a & 0xffff0000u)), (Vec)(w & 0xffff0000u), acc);
#endif
}
INLINE UVec load_pairs(const void* p) {
  UVec v;
  memcpy(&v, p, 64);
  return v;
}

}  // namespace quire::ISA
