// Rounding of weights to codes. `kernels/reference/codes.py` specifies it.
#include <cmath>

#include "codes.h"
#include "team.h"

namespace quire::ISA {

// The codes of a weight: their number of bits, grid, code of zero, and type of scales.
struct Rounding {
  int64_t bits, group_size;
  ScaleType type;
  Grid grid;
  float zero;
  char* scales;
};

// A row of 8 bits with one scale, which is returned: as rows of x.
static float round_whole(const float* row, int64_t k, uint8_t* codes, int8_t* memory) {
  int32_t total;
  float scale = round_row(row, k, memory, &total);
  for (int64_t i = 0; i < k; i++) codes[i] = (uint8_t)(memory[i] + 128);
  return scale;
}

INLINE Vec clamp(Vec v, float least, float most) { return vmax(splat(least), vmin(splat(most), v)); }

// The nearest of the doubled numbers of e2m1: steps of 1 up to 4, of 2 up to 8, of 4 up to 12.
INLINE Vec to_e2m1(Vec v) {
  Vec twos = round_to_int(v * splat(0.5f)) * splat(2.0f), fours = round_to_int(v * splat(0.25f)) * splat(4.0f);
  return clamp(round_to_int(v), -4, 4) + (clamp(twos, -8, 8) - clamp(twos, -4, 4)) +
         (clamp(fours, -12, 12) - clamp(fours, -8, 8));
}

// Numbers in units of a scale, rounded and limited to those that have codes.
INLINE Vec in_units(const Rounding& r, Vec v, float scale) {
  float factor = scale < SMALLEST_ROUNDED && scale > -SMALLEST_ROUNDED ? 0.0f : 1.0f / scale;
  v = v * splat(factor);
  return r.grid == Grid::e2m1 ? to_e2m1(v) : clamp(round_to_int(v), -r.zero, r.zero - 1.0f);
}

static uint8_t code_of(const Rounding& r, int number) {
  static const uint8_t magnitudes[13] = {0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7};
  if (r.grid == Grid::integers) return (uint8_t)(number + (int)r.zero);
  return number < 0 ? magnitudes[-number] | 8 : magnitudes[number];
}

// The nearest e4m3 number of x from 0 to 448, ties to even.
static float to_e4m3(float x) {
  if (x < 0x1p-6f) return x + 0x1.8p14f - 0x1.8p14f;  // subnormal: the sum is rounded to units of 2^-9
  uint32_t bits = as_bits(x);
  return as_float((bits + 0x7ffff + (bits >> 20 & 1)) & ~0xfffffu);
}

// Numbers of e2m1 that the largest magnitude of a group is tried as, and exponents of halved scales: see the reference.
constexpr float NVFP4_TOPS[] = {6.0f, 5.5f, 5.0f, 4.5f, 4.0f, 6.5f, 7.0f}, LEAST_TOP = 4.0f;
constexpr int MXFP4_SHIFTS[] = {-4, -3, -5};

// Half of the factor of a row's e4m3 scales: a power of two. most: the row's largest magnitude.
static float nvfp4_factor(float most) {
  int exponent;
  frexpf(most / (LEAST_TOP * 448.0f), &exponent);
  return ldexpf(0.5f, exponent);
}

// Largest and smallest number of a group; `bad` is NaN if one is not finite.
struct Range {
  float top, bottom, bad;
};
static Range range_of(const float* group, int64_t size) {
  Vec most = splat(group[0]), least = most, bad{};
  for (int64_t i = 0; i < size; i += LANES) {
    Vec v = load_some(group + i, size - i);
    most = vmax(most, v);
    least = vmin(least, v);
    bad = fma(v, Vec{}, bad);
  }
  return {largest(most), -largest(-least), sum(bad)};
}

// Writes the scales to try for a group, and returns their number. factor: of `nvfp4_factor`.
static int scales_to_try(const Rounding& r, Range range, float factor, float* scales) {
  int count = 0;
  if (r.grid == Grid::integers) {
    float extreme = range.top > -range.bottom ? range.top : range.bottom;
    const float steps[] = {r.zero / (r.zero - 1.0f), 1.0f, 0.95f, 0.9f, 0.85f, 0.8f, 0.75f, 0.7f, 0.65f};
    for (float step : steps) scales[count++] = extreme * (-step / r.zero);
    return count;
  }
  float most = maxf(range.top, -range.bottom);
  int exponent;
  frexpf(most, &exponent);
  if (most < SMALLEST_ROUNDED)
    scales[count++] = 0.0f;
  else if (r.group_size == 32)
    for (int shift : MXFP4_SHIFTS) scales[count++] = ldexpf(1.0f, exponent + shift);
  else
    for (float top : NVFP4_TOPS) scales[count++] = to_e4m3(most / (2.0f * top * factor)) * factor;
  return count;
}

// A group: of several scales the one with the least squared error, which is stored at `index`.
static void round_group(const Rounding& r, const float* group, int64_t size, uint8_t* codes, int64_t index,
                        float factor) {
  Range range = range_of(group, size);
  range.bad += factor * 0.0f;
  if (range.bad != range.bad) {
    store_scale(r.type, r.scales, index, range.bad);
    memset(codes, code_of(r, 0), size);
    return;
  }
  float scales[9], best = INFINITY, chosen = NAN;
  int count = scales_to_try(r, range, factor, scales);
  for (int s = 0; s < count; s++) {
    float tried = store_scale(r.type, r.scales, index, scales[s]);
    Vec errors{};
    for (int64_t i = 0; i < size; i += LANES) {
      Vec v = load_some(group + i, size - i), d = fma(in_units(r, v, tried), splat(tried), -v);
      errors = fma(d, d, errors);
    }
    float error = sum(errors);
    if (error < best * 0.9999f) best = error, chosen = tried;
  }
  for (int64_t i = 0; i < size; i += LANES) {
    int8_t bytes[LANES];
    store_bytes(bytes, to_ints(in_units(r, load_some(group + i, size - i), chosen)));
    for (int64_t j = 0; j < min(LANES, size - i); j++) codes[i + j] = code_of(r, bytes[j]);
  }
  store_scale(r.type, r.scales, index, chosen);
}

// source float32 (n, k), codes uint8 (n, k), scales (n, groups), their type, n, k, bits, group size (0: a row), grid
void quantize_rows(const Arg* a, const Team& team) {
  auto source = (const float*)a[0].data;
  auto codes = (uint8_t*)a[1].data;
  int64_t n = a[4].integer, k = a[5].integer, begin, end;
  Rounding r = {a[6].integer, a[7].integer, (ScaleType)a[3].integer, (Grid)a[8].integer, 0, (char*)a[2].data};
  int64_t size = r.group_size ? r.group_size : k, groups = (k + size - 1) / size;
  r.zero = (float)(1 << (r.bits - 1));
  team.share(n, 1, &begin, &end);
  for (int64_t i = begin; i < end; i++) {
    const float* row = source + i * k;
    if (r.bits == 8 && r.group_size == 0) {
      float scale = round_whole(row, k, codes + i * k, (int8_t*)team.scratch(up_to(k, LANES)));
      store_scale(r.type, r.scales, i, scale);
      continue;
    }
    float factor = 1.0f;
    if (r.grid == Grid::e2m1 && r.group_size != 32) {
      Range range = range_of(row, k);
      factor = range.bad != range.bad ? range.bad : nvfp4_factor(maxf(range.top, -range.bottom));
    }
    for (int64_t g = 0; g < groups; g++)
      round_group(r, row + g * size, min(size, k - g * size), codes + i * k + g * size, i * groups + g, factor);
  }
}

}  // namespace quire::ISA
