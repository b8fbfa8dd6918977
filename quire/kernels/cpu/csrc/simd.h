// Vectors of 16 numbers, for the instruction set that this file is compiled with.
//
// Everything is in the namespace of the instruction set and inlined. If two builds shared a symbol, the linker could
// keep the code that this machine cannot run.
//
// A register has 16, 8 or 4 numbers. Machine-dependent functions are written for one register; shorter registers form a
// vector as pairs (see simd_pair.h).
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "simd_pair.h"

namespace quire::ISA {

struct bf16 {
  uint16_t bits;
};

#if defined(__AVX512F__)
constexpr int REGISTER_BYTES = 64;
constexpr int VECTORS_AT_ONCE = 16;  // sums that fit into registers together with the operands
#elif defined(__AVX2__)
constexpr int REGISTER_BYTES = 32;
constexpr int VECTORS_AT_ONCE = 6;
#else
constexpr int REGISTER_BYTES = 16;
constexpr int VECTORS_AT_ONCE = 3;
#endif
constexpr int LANES = 16;
constexpr int REGISTER_LANES = REGISTER_BYTES / 4;

typedef float Floats __attribute__((vector_size(REGISTER_BYTES)));
typedef int32_t Ints __attribute__((vector_size(REGISTER_BYTES)));
typedef uint32_t UInts __attribute__((vector_size(REGISTER_BYTES)));
typedef int16_t Shorts __attribute__((vector_size(REGISTER_BYTES)));
typedef uint16_t UnsignedShorts __attribute__((vector_size(REGISTER_BYTES)));
typedef double Doubles __attribute__((vector_size(REGISTER_BYTES)));
typedef int64_t Longs __attribute__((vector_size(REGISTER_BYTES)));
typedef uint64_t ULongs __attribute__((vector_size(REGISTER_BYTES)));
typedef float HalfFloats __attribute__((vector_size(REGISTER_BYTES / 2)));
typedef uint16_t UShorts __attribute__((vector_size(REGISTER_BYTES / 2)));

template <class Register>
using Vector = typename Several<Register, 64 / REGISTER_BYTES>::Type;
using Vec = Vector<Floats>;
using IVec = Vector<Ints>;
using UVec = Vector<UInts>;
using SVec = Vector<Shorts>;  // 32 numbers
using USVec = Vector<UnsignedShorts>;
using DVec = Vector<Doubles>;  // 8 numbers, like the next two
using LVec = Vector<Longs>;
using ULVec = Vector<ULongs>;

constexpr INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
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
INLINE void put(bf16* target, float x) {  // rounds to nearest, ties to even; NaN stays NaN
  uint32_t bits = as_bits(x);
  target->bits = x != x ? (uint16_t)((bits >> 16) | 0x40) : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE Vec splat(float x) { return x - Vec{}; }  // a sum would turn -0 into 0, and cost an addition
INLINE IVec splat_int(int32_t x) { return IVec{} + x; }
INLINE IVec lane_numbers() {
  static const int32_t numbers[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load_bits<IVec>(numbers);
}

// ---- bf16 ----

// Rounds each number to bf16, in the lower half of its lane; NaN stays NaN.
INLINE UInts to_bf16(Floats v) {
#if defined(__AVX512BF16__)
  return (UInts)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v));
#else
  UInts bits = (UInts)v, high = bits >> 16, rounded = (bits + (high & 1) + 0x7fff) >> 16;
#if defined(__AVX512F__)
  __mmask16 is_nan = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q);
  return (UInts)_mm512_mask_or_epi32((__m512i)rounded, is_nan, (__m512i)high, _mm512_set1_epi32(0x40));
#else
  UInts is_nan = (UInts)(v != v);
  return (rounded & ~is_nan) | ((high | 0x40) & is_nan);
#endif
#endif
}
EACH(to_bf16)

INLINE void read(const float* p, Floats* v) { read_bits(p, v); }
INLINE void read(const bf16* p, Floats* v) {
#if defined(__AVX512F__)
  *v = (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
  *v = (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#elif defined(__SSE2__)
  *v = (Floats)_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i*)p));
#else
  *v = (Floats)(__builtin_convertvector(load_bits<UShorts>(p), UInts) << 16);
#endif
}
INLINE void store(float* p, Floats v) { store_bits(p, v); }
INLINE void store(bf16* p, Floats v) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  __m256i bits = (__m256i)to_bf16(v), packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits), 0x08);
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
#else
  store_bits(p, __builtin_convertvector(to_bf16(v), UShorts));
#endif
}
template <class T, class H>
INLINE void read(const T* p, Pair<H>* v) {
  read(p, &v->low);
  read(p + sizeof(H) / 4, &v->high);
}
template <class T, class H>
INLINE void store(T* p, Pair<H> v) {
  store(p, v.low);
  store(p + sizeof(H) / 4, v.high);
}
template <class T>
INLINE Vec load(const T* p) {
  Vec v;
  read(p, &v);
  return v;
}

INLINE void store_two(bf16* p, Vec first, Vec second) {
#if defined(__AVX512BF16__)
  _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#else
  store(p, first);
  store(p + LANES, second);
#endif
}

// load or store the first n of 16 numbers; the others are loaded as 0 and not written
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

// Writes the lower bytes, or the lower halves, of 16 integers.
INLINE void store_bytes(void* p, IVec v) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v));
#elif defined(__AVX2__)
  IVec bytes = v & 0xff;
  __m256i shorts = _mm256_packus_epi32((__m256i)bytes.low, (__m256i)bytes.high);  // numbers 0-3, 8-11, 4-7, 12-15
  __m256i packed = _mm256_packus_epi16(shorts, shorts);
  packed = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5));
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
#else
  int32_t all[LANES];
  store_bits(all, v);
  for (int i = 0; i < LANES; i++) ((int8_t*)p)[i] = (int8_t)all[i];
#endif
}
INLINE void store_shorts(int16_t* p, IVec v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)v));
#else
  int32_t all[LANES];
  store_bits(all, v);
  for (int i = 0; i < LANES; i++) p[i] = (int16_t)all[i];
#endif
}

// ---- arithmetic ----

INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;  // contracted if the machine has a fused multiply-add
#endif
}
// x itself, a register, which GCC does not rewrite: a product stays apart from a sum, and so is rounded in the same way
// everywhere; terms of sums stay in order, where another order needs more registers.
template <class Register>
INLINE Register opaque(Register x) {
#if defined(__x86_64__)
  __asm__("" : "+v"(x));
#elif defined(__aarch64__)
  __asm__("" : "+w"(x));
#endif
  return x;
}
// Forces x, an array, to memory: GCC may not keep it in registers.
template <class Array>
INLINE void in_memory(Array& x) {
  __asm__ volatile("" : "+m"(x));
}
// p itself, from which GCC loads nothing until x is computed.
template <class Register>
INLINE const char* after(const char* p, Register x) {
#if defined(__x86_64__)
  __asm__("" : "+r"(p) : "v"(x));
#elif defined(__aarch64__)
  __asm__("" : "+r"(p) : "w"(x));
#endif
  return p;
}
template <class H>
INLINE const char* after(const char* p, Pair<H> x) {
  return after(p, x.high);
}
INLINE Floats select(Ints mask, Floats a, Floats b) {  // lanes of mask are 0 or -1
#if defined(__AVX512F__)
  return (Floats)_mm512_mask_blend_ps(_mm512_movepi32_mask((__m512i)mask), (__m512)b, (__m512)a);
#elif defined(__AVX2__)
  return (Floats)_mm256_blendv_ps((__m256)b, (__m256)a, (__m256)mask);
#else
  return (Floats)(((Ints)a & mask) | ((Ints)b & ~mask));
#endif
}
INLINE Floats vmax(Floats a, Floats b) {  // b where either is NaN
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
  return (Floats)_mm_max_ps((__m128)a, (__m128)b);
#else
  return a > b ? a : b;
#endif
}
INLINE Floats vmin(Floats a, Floats b) {  // b where either is NaN
#if defined(__AVX512F__)
  return (Floats)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Floats)_mm256_min_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
  return (Floats)_mm_min_ps((__m128)a, (__m128)b);
#else
  return a < b ? a : b;
#endif
}
INLINE UInts umax(UInts a, UInts b) {
#if defined(__AVX512F__)
  return (UInts)_mm512_max_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (UInts)_mm256_max_epu32((__m256i)a, (__m256i)b);
#else
  return a > b ? a : b;
#endif
}
INLINE Floats round_to_int(Floats x) {
#if defined(__AVX512F__)
  return (Floats)_mm512_roundscale_ps((__m512)x, 8);
#elif defined(__AVX2__)
  return (Floats)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const float magic = 12582912.0f;  // 1.5 * 2^23: the sum is rounded to an integer
  return (x + magic) - magic;
#endif
}
// 1 / x for normal x above 0, within 2 units in the last place
INLINE Floats reciprocal(Floats x) {
#if defined(__AVX512F__)
  Floats r = (Floats)_mm512_rcp14_ps((__m512)x);
  return r * fma(-x, r, Floats{} + 2.0f);
#else
  return 1.0f / x;
#endif
}
INLINE Ints to_ints(Floats x) { return __builtin_convertvector(x, Ints); }
INLINE Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }

template <class H>
INLINE Pair<H> fma(Pair<H> a, Pair<H> b, Pair<H> c) {
  return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)};
}
template <class M, class H>
INLINE Pair<H> select(Pair<M> mask, Pair<H> a, Pair<H> b) {
  return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)};
}
EACH_OF_TWO(vmax)
EACH_OF_TWO(vmin)
EACH_OF_TWO(umax)
EACH(opaque)
EACH(round_to_int)
EACH(reciprocal)
EACH(to_ints)
EACH(to_floats)

// Conversion of float32 to doubles and back.
INLINE void to_doubles(Vec v, DVec* low, DVec* high) {
  alignas(64) float numbers[LANES];
  alignas(64) double wide[LANES];
  store(numbers, v);
  for (int i = 0; i < LANES; i += REGISTER_LANES / 2)
    store_bits(wide + i, __builtin_convertvector(load_bits<HalfFloats>(numbers + i), Doubles));
  *low = load_bits<DVec>(wide);
  *high = load_bits<DVec>(wide + 8);
}
INLINE Vec from_doubles(DVec low, DVec high) {
  alignas(64) float numbers[LANES];
  alignas(64) double wide[LANES];
  store_bits(wide, low);
  store_bits(wide + 8, high);
  for (int i = 0; i < LANES; i += REGISTER_LANES / 2)
    store_bits(numbers + i, __builtin_convertvector(load_bits<Doubles>(wide + i), HalfFloats));
  return load((const float*)numbers);
}

// ---- all lanes ----

// One bit per lane of a mask.
INLINE uint32_t bits_of(Ints mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
  return (uint32_t)_mm256_movemask_ps((__m256)mask);
#elif defined(__SSE2__)
  return (uint32_t)_mm_movemask_ps((__m128)mask);
#else
  uint32_t bits = 0;
  for (int i = 0; i < REGISTER_LANES; i++) bits |= (uint32_t)(mask[i] & 1) << i;
  return bits;
#endif
}
template <class H>
INLINE uint32_t bits_of(Pair<H> mask) {
  return bits_of(mask.low) | bits_of(mask.high) << sizeof(H) / 4;
}

// Sums and maxima of the lanes, by adding halves: the order is the same on every machine.
template <int width, class Both>
INLINE Floats folded(Floats v, Both both) {
  Ints other;
  for (int i = 0; i < REGISTER_LANES; i++) other[i] = i ^ width;
  return both(v, __builtin_shuffle(v, other));
}
template <class Both>
INLINE float reduced(Floats v, Both both) {
  if (REGISTER_LANES > 4) v = folded<4 % REGISTER_LANES>(v, both);
  return folded<1>(folded<2>(v, both), both)[0];
}
template <class H, class Both>
INLINE float reduced(Pair<H> v, Both both) {
  return reduced(both(v.low, v.high), both);
}
struct Add {
  template <class V>
  INLINE_MEMBER V operator()(V a, V b) const { return a + b; }
};
struct Larger {
  template <class V>
  INLINE_MEMBER V operator()(V a, V b) const { return vmax(a, b); }
};
INLINE float sum(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  return reduced(v, Add{});
#endif
}
INLINE float largest(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  return reduced(v, Larger{});
#endif
}

INLINE int32_t sum(IVec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t all[LANES], total = 0;
  store_bits(all, v);
  for (int32_t one : all) total += one;
  return total;
#endif
}
INLINE uint32_t largest_bits(UVec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epu32((__m512i)v);
#else
  uint32_t all[LANES], most = 0;
  store_bits(all, v);
  for (uint32_t one : all) most = one > most ? one : most;
  return most;
#endif
}

// ---- functions ----

// e^x within 2 units in the last place between -87 and 88; x is clamped to this range.
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
  return p * (Vec)((to_ints(n) + 127) << 23);
}
INLINE Vec tanh(Vec x) {
  Vec e = exp(splat(2.0f) * vmax(vmin(x, splat(15.0f)), splat(-15.0f)));
  return (e - 1.0f) / (e + 1.0f);
}

}  // namespace quire::ISA
