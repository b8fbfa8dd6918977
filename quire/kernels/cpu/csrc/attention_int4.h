// Keys and values in int4, expanded to the parts that queries in float32 or bf16 read: one step of an item at a time.
#pragma once
#include "attention_rows.h"

namespace quire::ISA {

// Unsigned bytes as integers.
INLINE IVec load_bytes(const char* p) {
#if defined(__AVX512F__)
  return (IVec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#else
  int32_t all[LANES];
  for (int i = 0; i < LANES; i++) all[i] = (uint8_t)p[i];
  return load_bits<IVec>(all);
#endif
}

// The bytes of expanded keys, or values, of a part.
INLINE int64_t expanded_part_bytes(const Attention& a) { return PART_TOKENS * a.padded * (a.is_bf16 ? 2 : 4); }
INLINE int64_t expanded_bytes(const Attention& a) {
  return a.stored == Stored::int4 ? 2 * STEP_PARTS * expanded_part_bytes(a) : 0;
}

// The same attention to keys and values that were expanded into `memory`.
static Attention expanded_in(const Attention& a, char* memory) {
  Attention expanded = a;
  expanded.stored = a.is_bf16 ? Stored::bfloat16 : Stored::float32;
  expanded.part_bytes = expanded_part_bytes(a);
  expanded.keys = memory;
  expanded.values = memory + STEP_PARTS * expanded.part_bytes;
  return expanded;
}

INLINE void store_pair(float* p, int64_t stride, Vec first, Vec second) {
  store(p, first);
  store(p + stride, second);
}
INLINE void store_pair(bf16* p, int64_t, Vec first, Vec second) { store_bits(p, to_bf16(first) | to_bf16(second) << 16); }

struct Pairs {
  Vec scales, offsets;
};
// The scales, and the offsets minus those of code 0, of 16 pairs.
INLINE Pairs load_pairs(const char* p) {
  UVec words = load_bits<UVec>(p);
  Vec scales = (Vec)(words << 16), offsets = (Vec)(words & 0xffff0000u);
  return {scales, fma(scales, splat(-8.0f), offsets)};
}

// Writes dimensions [d, d + 2) of 16 keys.
template <class X>
INLINE void expand_keys(const Attention& a, X* keys, int64_t d, const Pairs& pairs, IVec first, IVec second) {
  if (d >= a.padded) return;
  store_pair(keys + d * PART_TOKENS, PART_TOKENS, fma(to_floats(first & 15), pairs.scales, pairs.offsets),
             fma(to_floats(second & 15), pairs.scales, pairs.offsets));
}

// Writes dimensions [d, d + 16) of tokens t and t + 1.
template <class X>
INLINE void expand_values(const Attention& a, X* values, int64_t t, int64_t d, IVec first, IVec second,
                          const float* scales, const float* offsets) {
  if (d >= a.padded) return;
  constexpr int64_t width = 4 / sizeof(X);
  store_pair(values + t * a.padded + d * width, a.padded, fma(to_floats(first & 15), splat(scales[0]), splat(offsets[0])),
             fma(to_floats(second & 15), splat(scales[1]), splat(offsets[1])));
}

// Expands `parts` parts at `places` into the memory of `expanded`, and sets their places there. Prefetches those that are
// needed next.
template <class X>
static void expand(const Attention& a, int64_t* places, const int64_t* coming, int64_t parts, const Attention& expanded) {
  int64_t row = a.groups * INT4_GROUP / 2;
  for (int64_t i = 0; i < parts; i++) {
    for (int64_t at = 0; at < a.part_bytes; at += 64) fetch(a.keys + coming[i] + at), fetch(a.values + coming[i] + at);
    const char *k = a.keys + places[i], *v = a.values + places[i];
    places[i] = i * expanded.part_bytes;
    auto keys = (X*)(expanded.keys + places[i]), values = (X*)(expanded.values + places[i]);
    for (int64_t g = 0; g < a.groups; g++) {
      Pairs of_keys = load_pairs(k + a.scales_at + g * 64), of_values = load_pairs(v + a.scales_at + g * 64);
      for (int64_t word = 0; word < 4; word++) {
        IVec bytes = load_bits<IVec>(k + (g * 4 + word) * 64);
        for (int64_t half = 0; half < 2; half++, bytes = (IVec)((UVec)bytes >> 4)) {
          int64_t d = g * INT4_GROUP + half * INT4_GROUP / 2 + word * 4;
          expand_keys(a, keys, d, of_keys, bytes, (IVec)((UVec)bytes >> 8));
          expand_keys(a, keys, d + 2, of_keys, (IVec)((UVec)bytes >> 16), (IVec)((UVec)bytes >> 24));
        }
      }
      alignas(64) float scales[PART_TOKENS], offsets[PART_TOKENS];
      store(scales, of_values.scales);
      store(offsets, of_values.offsets);
      for (int64_t t = 0; t < PART_TOKENS; t += 2) {
        IVec first = load_bytes(v + t * row + g * LANES), second = load_bytes(v + (t + 1) * row + g * LANES);
        int64_t d = g * INT4_GROUP;
        expand_values(a, values, t, d, first, second, scales + t, offsets + t);
        expand_values(a, values, t, d + LANES, first >> 4, second >> 4, scales + t, offsets + t);
      }
    }
  }
}

}  // namespace quire::ISA
