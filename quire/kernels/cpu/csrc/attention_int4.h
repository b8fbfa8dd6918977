// Keys and values in int4, expanded to parts of int8: one step of an item at a time.
#pragma once
#include "attention_rows.h"

namespace quire::ISA {

INLINE int64_t expanded_part_bytes(const Attention& a) { return PART_TOKENS * (a.padded + 4); }
INLINE int64_t expanded_bytes(const Attention& a) {
  return a.stored == Stored::int4 ? 2 * STEP_PARTS * expanded_part_bytes(a) : 0;
}

// The same attention to rotated keys and values that were expanded into `memory`.
static Attention expanded_in(const Attention& a, char* memory) {
  Attention expanded = a;
  expanded.stored = Stored::int8;
  expanded.head_dim = a.padded;
  expanded.scales_at = PART_TOKENS * a.padded;
  expanded.part_bytes = expanded_part_bytes(a);
  expanded.keys = memory;
  expanded.values = memory + STEP_PARTS * expanded.part_bytes;
  return expanded;
}

// Copies the magnitudes of the scales of a part. Returns 0 for tokens whose codes have the zero 16, and 1 for 15.
INLINE UVec copy_scales(const char* from, char* to) {
  UVec scales = load_bits<UVec>(from);
  store_bits(to, scales & 0x7fffffffu);
  return scales >> 31u;
}

constexpr int64_t LOWER_BYTES = PART_TOKENS * INT4_UNIT / 2;  // of a unit of a part
constexpr uint32_t IN_EACH_BYTE = 0x01010101u;

// Writes what `finish` makes of the codes of numbers [0, 4) and [16, 20) of a unit, or of four tokens, one in each byte.
// Their upper bits are bits `i` and `other` of each byte of `upper`.
template <class Finish>
INLINE void expand_codes(UVec lower, UVec upper, uint32_t i, uint32_t other, char* first, char* second, Finish finish) {
  auto fifth = [&](uint32_t bit) __attribute__((always_inline)) {
    return (bit < 4 ? upper << (4 - bit) : upper >> (bit - 4)) & (IN_EACH_BYTE << 4);
  };
  store_bits(first, finish((lower & 0x0f0f0f0fu) | fifth(i)));
  store_bits(second, finish((lower >> 4u & 0x0f0f0f0fu) | fifth(other)));
}

// Codes minus their zeros, plus 128.
static void expand_keys(const Attention& a, const char* part, char* out) {
  UVec offsets = (copy_scales(part + a.scales_at, out + PART_TOKENS * a.padded) + 112u) * IN_EACH_BYTE;
  const char* all_upper = part + a.units * LOWER_BYTES;
  for (int64_t unit = 0; unit < a.units; unit++) {
    UVec upper = load_bits<UVec>(all_upper + unit * 64);
    char* to = out + unit * PART_TOKENS * INT4_UNIT;
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; i++)
      expand_codes(load_bits<UVec>(part + (unit * 4 + i) * 64), upper, i, i + 4, to + i * 64, to + (i + 4) * 64,
                   [&](UVec codes) __attribute__((always_inline)) { return codes + offsets; });
  }
}

// Codes minus their zeros, as signed bytes.
static void expand_values(const Attention& a, const char* part, char* out) {
  alignas(64) uint32_t up[PART_TOKENS];
  store_bits(up, copy_scales(part + a.scales_at, out + PART_TOKENS * a.padded));
  const char* all_upper = part + a.units * LOWER_BYTES;
#pragma GCC unroll 4
  for (uint32_t four = 0; four < 4; four++) {
    const uint32_t* u = up + four * 4;
    UVec offsets = UVec{} + (112u * IN_EACH_BYTE + (u[0] | u[2] << 8 | u[1] << 16 | u[3] << 24));
    for (int64_t unit = 0; unit < a.units; unit++) {
      char* to = out + (four * a.padded + unit * INT4_UNIT) * 4;
      expand_codes(load_bits<UVec>(part + (unit * 4 + four) * 64), load_bits<UVec>(all_upper + unit * 64), 2 * four,
                   2 * four + 1, to, to + 64,
                   [&](UVec codes) __attribute__((always_inline)) { return (codes + offsets) ^ (IN_EACH_BYTE << 7); });
    }
  }
}

// Expands `parts` parts at `places` into the memory of `expanded`, and sets their places there. Prefetches those that are
// needed next.
static void expand(const Attention& a, int64_t* places, const int64_t* coming, int64_t parts, const Attention& expanded) {
  for (int64_t i = 0; i < parts; i++) {
    for (int64_t at = 0; at < a.part_bytes; at += 64) fetch(a.keys + coming[i] + at), fetch(a.values + coming[i] + at);
    int64_t to = i * expanded.part_bytes;
    expand_keys(a, a.keys + places[i], (char*)expanded.keys + to);
    expand_values(a, a.values + places[i], (char*)expanded.values + to);
    places[i] = to;
  }
}

}  // namespace quire::ISA
