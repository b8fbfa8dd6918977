// Rounding of weights to codes. `kernels/reference/codes.py` specifies it.
#include <cmath>

#include "codes.h"
#include "team.h"

namespace quire::ISA {

// The codes of a weight: their number of bits, code of zero, and type of scales.
struct Rounding {
  int64_t bits, group_size;
  ScaleType type;
  float zero;
  char* scales;
};

// A row of 8 bits with one scale, which is returned: as rows of x.
static float round_whole(const float* row, int64_t k, uint8_t* codes, int8_t* memory) {
  float scale = round_row(row, k, memory);
  for (int64_t i = 0; i < k; i++) codes[i] = (uint8_t)(memory[i] + 128);
  return scale;
}

// Numbers in units of a scale, rounded and limited to those that have codes.
INLINE Vec in_units(const Rounding& r, Vec v, float scale) {
  float factor = scale < SMALLEST_ROUNDED && scale > -SMALLEST_ROUNDED ? 0.0f : 1.0f / scale;
  return vmax(splat(-r.zero), vmin(splat(r.zero - 1.0f), round_to_int(v * splat(factor))));
}

// A group: of several scales the one with the least squared error, which is stored at `index`.
static void round_group(const Rounding& r, const float* group, int64_t size, uint8_t* codes, int64_t index) {
  const float steps[] = {r.zero / (r.zero - 1.0f), 1.0f, 0.95f, 0.9f, 0.85f, 0.8f, 0.75f, 0.7f, 0.65f};
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
    store_scale(r.type, r.scales, index, none);
    memset(codes, (int)r.zero, size);
    return;
  }
  float best = INFINITY, chosen = NAN;
  for (float step : steps) {
    float tried = store_scale(r.type, r.scales, index, extreme * (-step / r.zero));
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
    for (int64_t j = 0; j < min(LANES, size - i); j++) codes[i + j] = (uint8_t)(bytes[j] + (int)r.zero);
  }
  store_scale(r.type, r.scales, index, chosen);
}

// source float32 (n, k), codes uint8 (n, k), scales (n, groups), their type, n, k, bits, group size (0: a row)
void quantize_rows(const Arg* a, const Team& team) {
  auto source = (const float*)a[0].data;
  auto codes = (uint8_t*)a[1].data;
  int64_t n = a[4].integer, k = a[5].integer, begin, end;
  Rounding r = {a[6].integer, a[7].integer, (ScaleType)a[3].integer, 0, (char*)a[2].data};
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
    for (int64_t g = 0; g < groups; g++)
      round_group(r, row + g * size, min(size, k - g * size), codes + i * k + g * size, i * groups + g);
  }
}

}  // namespace quire::ISA
