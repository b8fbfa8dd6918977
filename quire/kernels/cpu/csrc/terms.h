// Products of rows with stored operands (weights, keys, values), which are vectors of 64 bytes per step: one float32,
// or a pair of bf16, for each of 16 columns.
#pragma once
#include "simd.h"

namespace quire::ISA {

// A step adds `width` terms, in `parts`: part(y, i) is the stored operand of part i, and x has the row's next terms.
template <class T>
struct Term;

template <>
struct Term<float> {
  using Held = float;  // type of a row's numbers in a thread's memory
  static constexpr int width = 1, parts = 1;
  INLINE Vec part(const char* y, int) { return load((const float*)y); }
  INLINE Vec dot(Vec acc, const float* x, Vec y) { return fma(splat(*x), y, acc); }
};

#if defined(__AVX512BF16__)
template <>
struct Term<bf16> {
  using Held = bf16;
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
  static constexpr int width = 2, parts = 2;
  INLINE Vec part(const char* y, int i) {
    UVec pairs = load_bits<UVec>(y);
    return (Vec)(i ? pairs & 0xffff0000u : pairs << 16);
  }
  INLINE Vec dot(Vec acc, const float* x, Vec y) { return fma(splat(*x), y, acc); }
};
#endif

// A compiler barrier for loads. Without it GCC does all loads first, which needs more than 16 registers.
INLINE void one_after_another() {
#if !defined(__AVX512F__)
  __asm__ volatile("" ::: "memory");
#endif
}

// Adds a step's terms to sums of MR rows and N vectors of columns: the terms of row m at x + m * stride, times the
// vector at place(n).
template <class T, int MR, int N, class Place>
INLINE void add_terms(Vec (&sums)[MR][N], const typename Term<T>::Held* x, int64_t stride, Place place) {
#pragma GCC unroll 2
  for (int part = 0; part < Term<T>::parts; part++) {
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) {
      auto y = Term<T>::part(place(n), part);
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++) sums[m][n] = Term<T>::dot(sums[m][n], x + m * stride + part, y);
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
