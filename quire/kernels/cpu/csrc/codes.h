// Codes: rows of x rounded to 8 bits, and their products with unsigned codes of weights. Scales of weights.
#pragma once
#include <cmath>
#include <type_traits>

#include "products.h"
#include "terms.h"

namespace quire::ISA {

struct half {
  uint16_t bits;
};

INLINE float to_float(half x) {
  uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
  if (rest >= 0x7c00) return as_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  return as_float(sign | as_bits(as_float(rest << 13) * 0x1p112f));  // the product also scales subnormal numbers
}
INLINE void put(half* target, float x) {  // rounds to nearest, ties to even; NaN stays NaN
  uint32_t bits = as_bits(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff, out;
  if (rest > 0x7f800000)
    out = 0x7e00;
  else if (rest >= 0x477ff000)  // from 65520 on
    out = 0x7c00;
  else if (rest < 0x38800000)  // subnormal: the sum is rounded to units of 2^-24
    out = as_bits(as_float(rest) + 0.5f) - as_bits(0.5f);
  else
    out = (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13;
  target->bits = (uint16_t)(sign | out);
}
INLINE void read(const half* p, Floats* v) {
#if defined(__AVX512F__)
  *v = (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  *v = (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  for (int i = 0; i < REGISTER_LANES; i++) (*v)[i] = to_float(p[i]);
#endif
}

INLINE Vec load_scales(ScaleType type, const char* p, int64_t index) {
  if (type == ScaleType::float32) return load((const float*)p + index);
  return type == ScaleType::bfloat16 ? load((const bf16*)p + index) : load((const half*)p + index);
}
INLINE float load_scale(ScaleType type, const char* p, int64_t index) {
  if (type == ScaleType::float32) return ((const float*)p)[index];
  return type == ScaleType::bfloat16 ? to_float(((const bf16*)p)[index]) : to_float(((const half*)p)[index]);
}
// Stores x rounded to the type, and returns what is stored.
INLINE float store_scale(ScaleType type, char* p, int64_t index, float x) {
  if (type == ScaleType::float32)
    ((float*)p)[index] = x;
  else if (type == ScaleType::bfloat16)
    put((bf16*)p + index, x);
  else
    put((half*)p + index, x);
  return load_scale(type, p, index);
}

constexpr float SMALLEST_ROUNDED = 0x1p-96f;

// Rounds numbers to codes in [-127, 127], x = scale * code, and returns the scale; total: the sum of the codes. If one is NaN or
// infinity, the scale is NaN, so that all products are NaN. If the largest magnitude is below 2^-96, all codes are 0. Codes
// behind the numbers, up to a multiple of 16, become 0.
template <class T>
INLINE float round_row(const T* row, int64_t k, int8_t* codes, int32_t* total) {
  UVec most{};  // the bits of the largest magnitude: those of infinity and NaN are above all others
  int64_t whole = k / LANES * LANES;
  auto look = [&](Vec v) { most = umax(most, (UVec)v & 0x7fffffffu); };
  for (int64_t i = 0; i < whole; i += LANES) look(load(row + i));
  if (whole < k) look(load_some(row + whole, k - whole));
  float magnitude = as_float(largest_bits(most));
  *total = 0;
  if (!(magnitude < INFINITY)) {
    memset(codes, 0, up_to(k, LANES));
    return NAN;
  }
  bool is_zero = magnitude < SMALLEST_ROUNDED;
  Vec factor = splat(is_zero ? 0.0f : 127.0f / magnitude);
  IVec sums{};
  auto put = [&](int64_t i, Vec v) {
    IVec numbers = to_ints(round_to_int(v * factor));
    sums += numbers;
    store_bytes(codes + i, numbers);
  };
  for (int64_t i = 0; i < whole; i += LANES) put(i, load(row + i));
  if (whole < k) put(whole, load_some(row + whole, k - whole));
  *total = sum(sums);
  return is_zero ? 0.0f : magnitude / 127.0f;
}

// The numbers of the codes of 4-bit grids, in units of the scale. Those of integers are code - zero.
constexpr int8_t E2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // doubled
constexpr int8_t IQ4_NL[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
INLINE const int8_t* table_of(Grid grid) {
  return grid == Grid::e2m1 ? E2M1 : grid == Grid::iq4_nl ? IQ4_NL : nullptr;
}

// A register that has a grid's numbers + 128, as unsigned bytes, in each of its parts of 16 bytes.
INLINE Ints biased_table(Grid grid) {
  uint8_t bytes[REGISTER_BYTES];
  for (int i = 0; i < REGISTER_BYTES; i++) bytes[i] = (uint8_t)(table_of(grid)[i % 16] + 128);
  return load_bits<Ints>(bytes);
}
typedef uint8_t Bytes __attribute__((vector_size(16)));
// The bytes of a table for indices below 16.
INLINE Ints look_up(Ints table, Ints indices) {
#if defined(__AVX512BW__)
  return (Ints)_mm512_shuffle_epi8((__m512i)table, (__m512i)indices);
#elif defined(__AVX2__)
  return (Ints)_mm256_shuffle_epi8((__m256i)table, (__m256i)indices);
#elif defined(__SSE2__) && !defined(__SSSE3__)  // has no shuffle of bytes
  Bytes found{};
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) found |= (Bytes)((Bytes)indices == (uint8_t)i) & ((Bytes)table)[i];
  return (Ints)found;
#else
  return (Ints)__builtin_shuffle((Bytes)table, (Bytes)indices);
#endif
}
template <class H>
INLINE Pair<H> look_up(Ints table, Pair<H> indices) {
  return {look_up(table, indices.low), look_up(table, indices.high)};
}

// The codes of four terms, from a step of 4 bits or 6: see code_packing.cpp. part: which four of the step.
INLINE IVec nibbles(UVec bytes, int64_t part) { return (IVec)((part ? bytes >> 4 : bytes) & 0x0f0f0f0fu); }
INLINE IVec six_bits(UVec low, UVec high, int64_t part) {
  UVec moved = part == 0 ? high << 4 : part == 1 ? high << 2 : part == 2 ? high : high >> 2;
  return nibbles(low, part % 2) | (IVec)(moved & 0x30303030u);
}

// Sums plus products. Where all 16 registers are in use, GCC would copy some sums and keep others in memory, where each
// addition waits for the store of the one before.
#if defined(__AVX2__) && !defined(__AVX512F__)
#define ADD_IN_PLACE(V, instruction) \
  INLINE V add_products(V sums, V products) { \
    __asm__ volatile("" : "+x"(products.low), "+x"(products.high)); /* both, then both sums: the fastest order */ \
    __asm__ volatile(instruction " %1, %0, %0" : "+x"(sums.low) : "x"(products.low)); \
    __asm__ volatile(instruction " %1, %0, %0" : "+x"(sums.high) : "x"(products.high)); \
    return sums; \
  }
ADD_IN_PLACE(IVec, "vpaddd")
ADD_IN_PLACE(SVec, "vpaddw")
#undef ADD_IN_PLACE
#else
template <class V>
INLINE V add_products(V sums, V products) {
  return sums + products;
}
#endif

// Products of four terms: unsigned bytes of 16 columns, four each, times four terms of x for all columns.
struct CodeTerm {
#if defined(__AVX512VNNI__)
  using Held = int8_t;
  static constexpr int parts = 1;
  INLINE IVec part(IVec bytes, int) { return bytes; }
  INLINE IVec dot(IVec acc, const Held* x, IVec w) {
    int32_t four;
    memcpy(&four, x, 4);
    return (IVec)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(four));
  }
  INLINE IVec dot_in_place(IVec acc, const Held* x, IVec w) { return dot(acc, x, w); }
#else
  using Held = int16_t;  // terms 0, 2, 1, 3 of each four: pairs as they are multiplied
  static constexpr int parts = 2;
  INLINE IVec part(IVec bytes, int i) { return i ? (IVec)((USVec)bytes >> 8) : (IVec)((UVec)bytes & 0x00ff00ffu); }
  INLINE IVec products(const Held* x, IVec w) {
    int32_t pair;
    memcpy(&pair, x, 4);
    return add_pairs(w, splat_int(pair));
  }
  INLINE IVec dot(IVec acc, const Held* x, IVec w) { return acc + products(x, w); }
  INLINE IVec dot_in_place(IVec acc, const Held* x, IVec w) { return add_products(acc, products(x, w)); }
#endif
};
INLINE void hold_codes(const int8_t* codes, CodeTerm::Held* held, int64_t count) {
#if defined(__AVX512VNNI__)
  memcpy(held, codes, count);
#else
  for (int64_t i = 0; i < count; i += 4) {
    held[i] = codes[i];
    held[i + 1] = codes[i + 2];
    held[i + 2] = codes[i + 1];
    held[i + 3] = codes[i + 3];
  }
#endif
}

// Sums of 16 bits, two for each column, of products of codes below 64. Without VNNI they take half of the instructions. A
// product of two codes and two terms of x is at most 3810 with 4 bits, and 16002 with 6, so 8 or 2 of them can be added.
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
constexpr bool HAS_SHORT_SUMS = true;
INLINE Shorts multiply_pairs(Ints w, int32_t x) {
#if defined(__AVX512BW__)
  return (Shorts)_mm512_maddubs_epi16((__m512i)w, _mm512_set1_epi32(x));
#else
  return (Shorts)_mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi32(x));
#endif
}
template <class H>
INLINE auto multiply_pairs(Pair<H> w, int32_t x) -> Pair<decltype(multiply_pairs(w.low, x))> {
  return {multiply_pairs(w.low, x), multiply_pairs(w.high, x)};
}
INLINE SVec short_products(const int8_t* x, IVec w) {
  int32_t four;
  memcpy(&four, x, 4);
  return multiply_pairs(w, four);
}
#else
constexpr bool HAS_SHORT_SUMS = false;
#endif

}  // namespace quire::ISA
