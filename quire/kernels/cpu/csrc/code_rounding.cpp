// Rounding of weights to codes. `kernels/reference/codes.py` specifies it.
#include <cmath>

#include "codes.h"
#include "team.h"

namespace quire::ISA {

// A row of 8 bits: one scale, as for rows of x.
static void round_whole(const float* row, int64_t k, uint8_t* codes, float* scale, int8_t* memory) {
  *scale = round_row(row, k, memory);
  for (int64_t i = 0; i < k; i++) codes[i] = (uint8_t)(memory[i] + 128);
}

// Codes from -8 to 7 of numbers for a scale.
INLINE Vec four_bits(Vec v, float scale) {
  float factor = scale < SMALLEST_ROUNDED && scale > -SMALLEST_ROUNDED ? 0.0f : 1.0f / scale;
  return vmax(splat(-8.0f), vmin(splat(7.0f), round_to_int(v * splat(factor))));
}

// A group of 4 bits: of several scales the one with the least squared error.
static void round_group(const float* group, int64_t size, uint8_t* codes, bf16* scale) {
  static const float steps[] = {8.0f / 7.0f, 1.0f, 0.95f, 0.9f, 0.85f, 0.8f, 0.75f, 0.7f, 0.65f};
  Vec most = splat(group[0]), least = most, bad{};
  for (int64_t i = 0; i < size; i += LANES) {
    int64_t left = size - i;
    Vec v = load_some(group + i, left);
    most = vmax(most, v);
    least = vmin(least, v);
    bad = fma(v, Vec{}, bad);
  }
  float top = largest(most), bottom = -largest(-least), extreme = top > -bottom ? top : bottom, none = sum(bad);
  if (none != none) {
    put(scale, none);
    memset(codes, 8, size);
    return;
  }
  float best = INFINITY, chosen = NAN;
  for (float step : steps) {
    bf16 rounded;
    put(&rounded, extreme * (-step / 8.0f));
    float tried = to_float(rounded);
    Vec errors{};
    for (int64_t i = 0; i < size; i += LANES) {
      Vec v = load_some(group + i, size - i), d = fma(four_bits(v, tried), splat(tried), -v);
      errors = fma(d, d, errors);
    }
    float error = sum(errors);
    if (error < best * 0.9999f) best = error, chosen = tried;
  }
  for (int64_t i = 0; i < size; i += LANES) {
    int8_t bytes[LANES];
    store_bytes(bytes, to_ints(four_bits(load_some(group + i, size - i), chosen)));
    for (int64_t j = 0; j < min(LANES, size - i); j++) codes[i + j] = (uint8_t)(bytes[j] + 8);
  }
  put(scale, chosen);
}

// source float32 (n, k), codes uint8 (n, k), scales (n, groups): float32, or bf16 of groups; n, k, group size (0: 8 bits)
void quantize_rows(const Arg* a, const Team& team) {
  auto source = (const float*)a[0].data;
  auto codes = (uint8_t*)a[1].data;
  int64_t n = a[3].integer, k = a[4].integer, size = a[5].integer, begin, end;
  int64_t groups = size ? (k + size - 1) / size : 1;
  team.share(n, 1, &begin, &end);
  for (int64_t i = begin; i < end; i++) {
    const float* row = source + i * k;
    if (size == 0) {
      round_whole(row, k, codes + i * k, (float*)a[2].data + i, (int8_t*)team.scratch(up_to(k, LANES)));
      continue;
    }
    for (int64_t g = 0; g < groups; g++)
      round_group(row + g * size, min(size, k - g * size), codes + i * k + g * size, (bf16*)a[2].data + i * groups + g);
  }
}

}  // namespace quire::ISA
