// Weights of unsigned codes: their packed layout.
//
// A weight's value is scale * (code - zero) + offset, zero 128, 32 or 8 for codes of 8, 6 or 4 bits, or 0 if scales with
// factors have offsets. With a grid it is scale * number + offset: a table of bytes has number + 128 for each code of 4
// bits, so that the zero is 128. Each row has one scale and offset, or one for each group of columns. A vector of a tile (see
// products.h) has codes of 8 bits [16][4] of 4 terms, or of 4 bits [16][4] of 8 terms: the low halves of the bytes are the
// first four terms. Codes of 6 bits have three vectors for 16 terms: two with their low 4 bits, and one with the high 2 bits,
// those of the first four terms lowest. Scales and offsets of a tile are [groups][16], or see factors.h.
// Codes of the grid e4m3 are float8 numbers: see terms.h for the order of four codes.
#include "codes.h"
#include "factors.h"
#include "products.h"

namespace quire::ISA {

Format format_of(const Arg* numbers, int64_t k) {
  int64_t bits = numbers[0].integer, group_size = numbers[1].integer, vectors = bits == 6 ? 3 : 1;
  int64_t terms = bits == 6 ? 16 : 32 / bits, steps = (k + terms - 1) / terms;
  int64_t each = group_size ? group_size / terms : steps, x_each = numbers[4].integer / terms;
  return {bits,
          terms,
          vectors * VECTOR_BYTES,
          steps,
          (steps + each - 1) / each,
          each,
          (steps + x_each - 1) / x_each,
          x_each,
          (ScaleType)numbers[2].integer,
          (Grid)numbers[3].integer};
}

// The bytes of a vector that have terms 0 to 3 of a column, and 4 to 7 in their high halves.
static const int64_t* order_of(Grid grid) {
  static const int64_t kInOrder[] = {0, 1, 2, 3}, kPairs[] = {0, 2, 1, 3};
  return grid == Grid::e4m3 ? kPairs : kInOrder;
}

// Where a term of a step is in the bytes of a column.
struct Place {
  int64_t low, low_shift, high, high_shift;

  Place(const Format& f, int64_t term)
      : low(term / 8 * VECTOR_BYTES + order_of(f.grid)[term % 4]), low_shift(term / 4 % 2 * 4),
        high(2 * VECTOR_BYTES + term % 4), high_shift(term / 4 * 2) {}

  int32_t read(const uint8_t* step, int64_t bits) const {
    int32_t code = step[low] >> low_shift;
    if (bits == 8) return code;
    return bits == 4 ? code & 15 : (code & 15) | (step[high] >> high_shift & 3) << 4;
  }
  void write(uint8_t* step, int64_t bits, uint8_t code) const {
    step[low] |= (bits == 8 ? code : code & 15) << low_shift;
    if (bits == 6) step[high] |= code >> 4 << high_shift;
  }
};

// Writes rows [start, start + n) of a packed weight: the caller has zeroed them.
// source uint8 (n, k), target, n, k, start, the numbers of `format_of`
void pack_codes(const Arg* a, const Team& team) {
  auto source = (const uint8_t*)a[0].data;
  auto target = (uint8_t*)a[1].data;
  int64_t n = a[2].integer, k = a[3].integer, start = a[4].integer, begin, end, first_tile = start / 16;
  Format f = format_of(a + 5, k);
  team.share((start + n + 15) / 16 - first_tile, 1, &begin, &end);
  for (int64_t tile = first_tile + begin; tile < first_tile + end; tile++) {
    int64_t before = tile * 16 - start;  // first source row of the tile; negative if the tile begins before the source
    for (int64_t i = max(0, -before); i < min(16, n - before); i++) {
      const uint8_t* row = source + (before + i) * k;
      uint8_t* out = target + tile * f.steps * f.step_bytes + i * 4;
      for (int64_t term = 0; term < f.terms; term++) {
        Place place(f, term);
        for (int64_t column = term, at = 0; column < k; column += f.terms, at += f.step_bytes)
          place.write(out + at, f.bits, row[column]);
      }
    }
  }
}

struct Scale {
  float scale, offset;
};
static Scale scale_of(const Format& f, const char* scales, const char* offsets, int64_t row, int64_t group) {
  if (!f.has_factors()) {
    int64_t place = (row / 16 * f.groups + group) * 16 + row % 16;
    return {load_scale(f.type, scales, place), offsets ? load_scale(f.type, offsets, place) : 0.0f};
  }
  Factors factors(f);
  const char* block = factors.block(scales, row / 16, group / factors.groups);
  int64_t column = row % 16;
  group %= factors.groups;
  float scale = to_float(factors.factors(block)[column]) * (float)factors.scales(block, group)[column];
  if (!factors.has_offsets) return {scale, 0.0f};
  return {scale, to_float(factors.offset_factors(block)[column]) * (float)factors.offsets(block, group)[column]};
}

// Rows of a packed weight, times `scale`: for embeddings, and to unpack a weight.
// weight, scales, offsets or null, ids (count,) int64, target (count, k), dtype, count, k, n (other ids give zeros), the
// numbers of `format_of`, scale
template <class T>
static void unpack(const Arg* a, const Team& team) {
  auto weight = (const uint8_t*)a[0].data;
  auto scales = (const char*)a[1].data, offsets = (const char*)a[2].data;
  auto ids = (const int64_t*)a[3].data;
  auto target = (T*)a[4].data;
  int64_t count = a[6].integer, k = a[7].integer, n = a[8].integer, begin, end;
  Format f = format_of(a + 9, k);
  float factor = (float)a[9 + FORMAT_NUMBERS].number;
  int32_t zero = f.zero();
  const int8_t* table = table_of(f.grid);
  team.share(count, 1, &begin, &end);
  for (int64_t i = begin; i < end; i++) {
    int64_t row = ids[i];
    if (row < 0 || row >= n) {
      memset(target + i * k, 0, k * sizeof(T));
      continue;
    }
    const uint8_t* from = weight + row / 16 * f.steps * f.step_bytes + row % 16 * 4;
    for (int64_t step = 0; step < f.steps; step++, from += f.step_bytes) {
      auto [scale, offset] = scale_of(f, scales, offsets, row, step / f.each);
      for (int64_t term = 0; term < min(f.terms, k - step * f.terms); term++) {
        int32_t code = Place(f, term).read(from, f.bits);
        float number = f.grid == Grid::e4m3 ? float8(code) : (float)(table ? table[code] : code - zero);
        put(target + i * k + step * f.terms + term, (number * scale + offset) * factor);
      }
    }
  }
}

void unpack_codes(const Arg* a, const Team& team) { a[5].integer ? unpack<bf16>(a, team) : unpack<float>(a, team); }

}  // namespace quire::ISA
