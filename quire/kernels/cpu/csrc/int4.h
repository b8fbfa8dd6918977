// Heads of keys and values in int4: their rotation and the order of their codes. kernels/reference/quantized.py specifies
// both.
#pragma once
#include "terms.h"

namespace quire::ISA {

constexpr int64_t MAX_HEAD_DIM = 512;
constexpr int64_t INT4_UNIT = 32;  // numbers of a head; it is padded to a multiple
constexpr int64_t INT4_BYTES = 20;  // of the codes of a unit of a token

// Unsigned bytes as integers.
INLINE IVec load_bytes(const void* p) {
#if defined(__AVX512F__)
  return (IVec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#else
  int32_t all[LANES];
  for (int i = 0; i < LANES; i++) all[i] = ((const uint8_t*)p)[i];
  return load_bits<IVec>(all);
#endif
}

// Replaces each two lanes whose numbers differ by `width` with their sum and their difference.
template <int width>
INLINE Floats butterfly(Floats v) {
  Ints other;
  Floats sign;
  for (int i = 0; i < REGISTER_LANES; i++) {
    other[i] = i ^ (width % REGISTER_LANES);
    sign[i] = i & width ? -1.0f : 1.0f;
  }
  return __builtin_shuffle(v, other) + sign * v;
}
template <int width, class H>
INLINE Pair<H> butterfly(Pair<H> v) {
  if constexpr (width == sizeof(H) / 4)
    return {v.low + v.high, v.low - v.high};
  else
    return {butterfly<width>(v.low), butterfly<width>(v.high)};
}

// The Hadamard rotation of a head of `size` numbers, a multiple of INT4_UNIT.
static void hadamard(float* x, int64_t size) {
  while (size > 0) {
    int64_t length = int64_t{1} << (63 - __builtin_clzll((uint64_t)size));
    for (int64_t i = 0; i < length; i += LANES)
      store(x + i, butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(load(x + i))))));
    for (int64_t width = LANES; width < length; width *= 2)
      for (int64_t i = 0; i < length; i += LANES) {
        if (i & width) continue;
        Vec low = load(x + i), high = load(x + i + width);
        store(x + i, low + high);
        store(x + i + width, low - high);
      }
    float factor = (float)(1.0 / __builtin_sqrt((double)length));
    for (int64_t i = 0; i < length; i += LANES) store(x + i, load(x + i) * factor);
    x += length;
    size -= length;
  }
}

// The same for `count` numbers, padded by zeros to `size`.
template <class T>
INLINE void hadamard_of(const T* x, int64_t count, int64_t size, float* to) {
  for (int64_t i = 0; i < size; i += LANES) store(to + i, i < count ? load_some(x + i, count - i) : Vec{});
  hadamard(to, size);
}

// The place of the upper bit of each of 16 numbers in the word of these bits. That of the number 16 later is 4 bits later.
INLINE UVec places_of_upper_bits() {
  static const uint32_t places[LANES] = {0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27};
  return load_bits<UVec>(places);
}

}  // namespace quire::ISA
