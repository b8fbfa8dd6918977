// Products of rows with stored operands (weights, keys, values), which are vectors of 64 bytes per step: one float32, a
// pair of bf16, or four bytes, for each of 16 columns.
//
// Of four bytes, the even ones are terms 0 and 1, and the odd ones terms 2 and 3. So the pairs of terms that the
// processor multiplies at once are in order, and rows keep theirs. Codes that are multiplied four at once (see codes.h) are
// in order.
#pragma once
#include "simd.h"

namespace quire::ISA {

// Stored bytes: sign, four bits of exponent, three of mantissa. X: the type of numbers that they are multiplied with.
template <class X>
struct Fp8 {
  uint8_t bits;
};

INLINE float float8(int32_t code) {
  int32_t exponent = code >> 3 & 15, fraction = code & 7;
  float magnitude = exponent ? as_float((uint32_t)(exponent + 120) << 23 | fraction << 20) : (float)fraction * 0x1p-9f;
  return code & 0x80 ? -magnitude : magnitude;
}

// The type of stored keys and values. Those of 8 bits and int4 have a scale for each token.
enum class Stored : int64_t { float32, bfloat16, int8, fp8, int4 };
struct Int4 {
  uint8_t bits;
};
template <class K>
constexpr bool HAS_SCALES = sizeof(K) == 1;

// A step adds `width` terms, in `parts`: part(y, i) is the stored operand of part i, and x has the row's next terms.
template <class T>
struct Term;

template <>
struct Term<float> {
  using Held = float;  // type of a row's numbers in a thread's memory
  using Sum = Vec;
  static constexpr int width = 1, parts = 1;
  INLINE Vec part(const char* y, int) { return load((const float*)y); }
  INLINE Vec dot(Vec acc, const float* x, Vec y) { return fma(splat(*x), y, acc); }
};

#if defined(__AVX512BF16__)
template <>
struct Term<bf16> {
  using Held = bf16;
  using Sum = Vec;
  static constexpr int width = 2, parts = 1;
  INLINE UVec part(const char* y, int) { return load_bits<UVec>(y); }
  INLINE Vec dot(Vec acc, const bf16* x, UVec y) {
    int32_t pair;
    memcpy(&pair, x, 4);
    return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)y);
  }
};
#else
template <>
struct Term<bf16> {
  using Held = float;  // can be broadcast to all lanes
  using Sum = Vec;
  static constexpr int width = 2, parts = 2;
  INLINE Vec part(const char* y, int i) {
    UVec pairs = load_bits<UVec>(y);
    return (Vec)(i ? pairs & 0xffff0000u : pairs << 16);
  }
  INLINE Vec dot(Vec acc, const float* x, Vec y) { return fma(splat(*x), y, acc); }
};
#endif

// Sums of the products of two pairs of 16-bit integers.
INLINE Ints add_pairs(Ints a, Ints b) {
#if defined(__AVX512BW__)
  return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (Ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}
EACH_OF_TWO(add_pairs)

template <>
struct Term<int8_t> {
  using Held = int16_t;
  using Sum = IVec;
  static constexpr int width = 4, parts = 2;
  INLINE IVec part(const char* y, int i) {
    SVec bytes = load_bits<SVec>(y);
    return (IVec)(i ? bytes >> 8 : bytes << 8 >> 8);
  }
  INLINE IVec dot(IVec acc, const int16_t* x, IVec y) {
    int32_t pair;
    memcpy(&pair, x, 4);
#if defined(__AVX512VNNI__)
    return (IVec)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)y, _mm512_set1_epi32(pair));
#else
    return acc + add_pairs(y, splat_int(pair));
#endif
  }
};

template <>
struct Term<Fp8<float>> {
  using Held = float;
  using Sum = Vec;
  static constexpr int width = 4, parts = 4;
  INLINE Vec part(const char* y, int i) {
    const int from_top[] = {24, 8, 16, 0};
    UVec byte = load_bits<UVec>(y) << from_top[i], bits = (byte & 0x7f000000u) >> 4;
    Vec normal = (Vec)(bits + (120u << 23)), subnormal = (Vec)(bits + (121u << 23)) - 0x1p-6f;
    Vec magnitude = select((IVec)((byte & 0x78000000u) == 0u), subnormal, normal);
    return (Vec)((UVec)magnitude | (byte & 0x80000000u));
  }
  INLINE Vec dot(Vec acc, const float* x, Vec y) { return fma(splat(*x), y, acc); }
};

#if defined(__AVX512BF16__)
template <>
struct Term<Fp8<bf16>> {
  using Held = bf16;
  using Sum = Vec;
  static constexpr int width = 4, parts = 2;
  INLINE UVec part(const char* y, int i) {
    alignas(64) static const uint16_t kSubnormal[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
    __m512i bytes = _mm512_loadu_si512(y);
    if (i == 0) bytes = _mm512_slli_epi16(bytes, 8);
    __m512i magnitude = _mm512_srli_epi16(_mm512_and_si512(bytes, _mm512_set1_epi16(0x7f00)), 4);
    magnitude = _mm512_add_epi16(magnitude, _mm512_set1_epi16(120 << 7));
    __mmask32 is_subnormal = _mm512_testn_epi16_mask(bytes, _mm512_set1_epi16(0x7800));
    magnitude = _mm512_mask_permutexvar_epi16(magnitude, is_subnormal, _mm512_srli_epi16(bytes, 8),
                                              _mm512_load_si512(kSubnormal));
    return (UVec)_mm512_or_si512(magnitude, _mm512_and_si512(bytes, _mm512_set1_epi16((int16_t)0x8000)));
  }
  INLINE Vec dot(Vec acc, const bf16* x, UVec y) { return Term<bf16>::dot(acc, x, y); }
};
#else
template <>
struct Term<Fp8<bf16>> : Term<Fp8<float>> {};
#endif

// A compiler barrier for loads. Without it GCC does all loads first, which needs more than 16 registers.
INLINE void one_after_another() {
#if !defined(__AVX512F__)
  __asm__ volatile("" ::: "memory");
#endif
}

// Adds a step's terms (One is a Term) to sums of MR rows and N vectors of columns: the terms of row m at x + m * stride, times the
// vector at place(n).
template <class One, int MR, int N, class Place>
INLINE void add_terms(typename One::Sum (&sums)[MR][N], const typename One::Held* x, int64_t stride, Place place) {
  constexpr int terms = One::width / One::parts;
#pragma GCC unroll 4
  for (int part = 0; part < One::parts; part++) {
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) {
      auto y = One::part(place(n), part);
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++) sums[m][n] = One::dot(sums[m][n], x + m * stride + part * terms, y);
      if (N > 1) one_after_another();
    }
  }
}

// Copies a row, converted to Held.
template <class T>
INLINE void hold(const T* row, T* held, int64_t count) {
  memcpy(held, row, count * sizeof(T));
}
INLINE void hold(const bf16* row, float* held, int64_t count) {
  for (int64_t i = 0; i < count; i += LANES) store_some(held + i, load_some(row + i, min(LANES, count - i)), count - i);
}

}  // namespace quire::ISA
