// Matrix products of low-bit weights: x (rows, k) in bf16 or float32 times a packed weight (n, k) of unsigned codes.
//
// A weight's value is scale * (code - zero) + offset, zero 128 for codes of 8 bits and 8 for codes of 4. With a grid it is
// scale * number + offset: a table of bytes has number + 128 for each code of 4 bits, so that the zero is 128. Each row has
// one scale and offset, or one for each group of columns. A vector of a tile (see products.h) has codes of 8 bits [16][4] of 4
// terms, or of 4 bits [16][4] of 8 terms: the low halves of the bytes are the first four terms. Scales and offsets of a
// tile are [groups][16].
// Each row of x is rounded to 8 bits with one scale. The products of a group are added exactly, in integers, and groups
// in order. So the result of a row does not depend on other rows, on threads or on whether tile registers are used.
//
// Codes of the grid e4m3 are float8 numbers: see terms.h for the order of four codes. They are multiplied in floats with x
// as it is. The terms of a group are added in order, and groups in order.
#include "codes.h"
#include "product_tiles.h"
#include "products.h"
#include "terms.h"

namespace quire::ISA {

Format format_of(const Arg* numbers, int64_t k) {
  int64_t bits = numbers[0].integer, group_size = numbers[1].integer, terms = 32 / bits, steps = (k + terms - 1) / terms;
  int64_t each = group_size ? group_size / terms : steps;
  return {bits, terms, steps, (steps + each - 1) / each, each, (ScaleType)numbers[2].integer, (Grid)numbers[3].integer};
}

// ---- packing ----

// The bytes of a vector that have terms 0 to 3 of a column, and 4 to 7 in their high halves.
static const int64_t* order_of(Grid grid) {
  static const int64_t kInOrder[] = {0, 1, 2, 3}, kPairs[] = {0, 2, 1, 3};
  return grid == Grid::e4m3 ? kPairs : kInOrder;
}

// Writes rows [start, start + n) of a packed weight: the caller has zeroed them.
// source uint8 (n, k), target, bits, n, k, start, grid
void pack_codes(const Arg* a, const Team& team) {
  auto source = (const uint8_t*)a[0].data;
  auto target = (uint8_t*)a[1].data;
  int64_t n = a[3].integer, k = a[4].integer, start = a[5].integer, begin, end;
  int64_t first_tile = start / 16, terms = 32 / a[2].integer, steps = (k + terms - 1) / terms;
  const int64_t* bytes = order_of((Grid)a[6].integer);
  team.share((start + n + 15) / 16 - first_tile, 1, &begin, &end);
  for (int64_t tile = first_tile + begin; tile < first_tile + end; tile++) {
    int64_t before = tile * 16 - start;  // first source row of the tile; negative if the tile begins before the source
    for (int64_t i = max(0, -before); i < min(16, n - before); i++) {
      const uint8_t* row = source + (before + i) * k;
      uint8_t* out = target + tile * steps * VECTOR_BYTES + i * 4;
      for (int64_t column = 0; column < k; column++) {
        int64_t term = column % terms;
        out[column / terms * VECTOR_BYTES + bytes[term % 4]] |= row[column] << term / 4 * 4;
      }
    }
  }
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
  int32_t zero = 1 << (f.bits - 1), mask = (1 << f.bits) - 1;
  const int64_t* bytes = order_of(f.grid);
  const int8_t* table = table_of(f.grid);
  team.share(count, 1, &begin, &end);
  for (int64_t i = begin; i < end; i++) {
    int64_t row = ids[i];
    if (row < 0 || row >= n) {
      memset(target + i * k, 0, k * sizeof(T));
      continue;
    }
    const uint8_t* from = weight + row / 16 * f.steps * VECTOR_BYTES + row % 16 * 4;
    for (int64_t step = 0; step < f.steps; step++) {
      int64_t place = (row / 16 * f.groups + step / f.each) * 16 + row % 16;
      float scale = load_scale(f.type, scales, place), offset = offsets ? load_scale(f.type, offsets, place) : 0.0f;
      for (int64_t term = 0; term < min(f.terms, k - step * f.terms); term++) {
        int32_t code = (from[step * VECTOR_BYTES + bytes[term % 4]] >> term / 4 * 4) & mask;
        float number = f.grid == Grid::e4m3 ? float8(code) : (float)(table ? table[code] : code - zero);
        put(target + i * k + step * f.terms + term, (number * scale + offset) * factor);
      }
    }
  }
}

void unpack_codes(const Arg* a, const Team& team) { a[5].integer ? unpack<bf16>(a, team) : unpack<float>(a, team); }

// ---- products ----

namespace {
// Rounds a row of x to codes, and returns its scale. corrections: [groups], what the zero of the weight's codes adds to
// the sums of a group, negated.
float round_x(const CodeProduct& p, int64_t row, int32_t zero, int8_t* codes, int32_t* corrections) {
  const Format& f = p.format;
  int64_t place = row * p.x_stride, padded = f.steps * f.terms;
  float scale =
      p.is_bf16 ? round_row((const bf16*)p.x + place, p.k, codes) : round_row((const float*)p.x + place, p.k, codes);
  for (int64_t g = 0; g < f.groups; g++) {
    int32_t total = 0;
    for (int64_t i = g * f.each * f.terms; i < min(padded, (g + 1) * f.each * f.terms); i++) total += codes[i];
    corrections[g] = -zero * total;
  }
  return scale;
}

// Rows of x as codes, for weights with codes of BITS bits. GROUPED: whether rows of the weight have several scales.
// TABLE: whether codes are looked up.
template <int BITS, bool GROUPED, bool TABLE = false>
struct CodeRows {
  static constexpr int AT_ONCE = GROUPED ? max(1, VECTORS_AT_ONCE / 2) : VECTORS_AT_ONCE;
  static constexpr int TERMS = 32 / BITS, ZERO = TABLE ? 128 : 1 << (BITS - 1);

  const CodeProduct& p;
  int64_t first, count, tile_bytes;
  HeldCode* x;
  float* scales;
  int32_t* corrections;  // [count][groups]: see round_x
  int64_t stride;

  static int64_t row_bytes(const CodeProduct& p) { return p.k * sizeof(HeldCode); }

  CodeRows(const CodeProduct& p, int64_t first, int64_t count, const Team& team)
      : p(p), first(first), count(count), tile_bytes(p.format.steps * VECTOR_BYTES) {
    int64_t groups = p.format.groups, padded = p.format.steps * TERMS;
    stride = up_to(padded, 64) + 32;  // rarely a power of two, so that rows do not share cache sets
    int64_t code_bytes = count * stride * sizeof(HeldCode), row_bytes = up_to(padded, 64);
    char* memory = (char*)team.scratch(code_bytes + count * (groups + 1) * 4 + row_bytes);
    x = (HeldCode*)memory;
    scales = (float*)(memory + code_bytes);
    corrections = (int32_t*)(scales + count);
    auto codes = (int8_t*)(corrections + count * groups);
    for (int64_t i = 0; i < count; i++) {
      scales[i] = round_x(p, first + i, ZERO, codes, corrections + i * groups);
      hold_codes(codes, x + i * stride, padded);
    }
  }

  template <int MR, int NB>
  void multiply(const Panel& panel, int64_t row, Prefetch<NB> fetch) const {
    const Format& f = p.format;
    const HeldCode* from = x + row * stride;
    const int32_t* begin_at = corrections + row * f.groups;
    const char* w[NB];
    for (int n = 0; n < NB; n++) w[n] = p.weight + panel.tiles[n] * tile_bytes;
    Ints table = TABLE ? biased_table(f.grid) : Ints{};
    if (GROUPED && row == 0) fetch_scales(fetch.panel, NB);
    Vec sums[MR][NB];
    for_all<MR, NB>([&](int m, int n) { sums[m][n] = Vec{}; });
    for (int64_t g = 0; g < f.groups; g++) {
      IVec acc[MR][NB];
      for_all<MR, NB>([&](int m, int n) { acc[m][n] = splat_int(begin_at[m * f.groups + g]); });
      int64_t end = min(f.steps, (g + 1) * f.each);
      for (int64_t s = g * f.each; s < end; s++) {
        fetch.step(w, s * VECTOR_BYTES);
#pragma GCC unroll 8
        for (int n = 0; n < NB; n++) {
          IVec bytes = load_bits<IVec>(w[n] + s * VECTOR_BYTES);
          if (BITS == 8) {
            add<MR, NB>(acc, n, from + s * 4, codes_of(bytes));
          } else {
            IVec low = (IVec)((UVec)bytes & 0x0f0f0f0fu), high = (IVec)(((UVec)bytes >> 4) & 0x0f0f0f0fu);
            add<MR, NB>(acc, n, from + s * 8, codes_of(TABLE ? look_up(table, low) : low));
            add<MR, NB>(acc, n, from + s * 8 + 4, codes_of(TABLE ? look_up(table, high) : high));
          }
          if (NB > 1) one_after_another();
        }
      }
#pragma GCC unroll 8
      for (int n = 0; n < NB; n++) {
        Vec scale = load_scales(f.type, p.scales, (panel.tiles[n] * f.groups + g) * 16);
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) sums[m][n] = fma(to_floats(acc[m][n]), scale, sums[m][n]);
      }
      if (p.offsets == nullptr) continue;
      for (int n = 0; n < NB; n++) {
        Vec offset = load_scales(f.type, p.offsets, (panel.tiles[n] * f.groups + g) * 16);
        for (int m = 0; m < MR; m++)
          sums[m][n] = fma(splat(begin_at[m * f.groups + g] * (-1.0f / ZERO)), offset, sums[m][n]);
      }
    }
    for_all<MR, NB>([&](int m, int n) { sums[m][n] = unfused(sums[m][n] * splat(scales[row + m])); });
    p.is_bf16 ? finish_all<bf16>(p, panel, first + row, sums) : finish_all<float>(p, panel, first + row, sums);
  }

  // Prefetches the scales and offsets of the next panel.
  INLINE_MEMBER void fetch_scales(const Panel& next, int tiles) const {
    int64_t bytes = p.format.groups * 16 * scale_bytes(p.format.type);
    for (int n = 0; n < tiles; n++)
      for (int64_t at = next.tiles[n] * bytes; at < (next.tiles[n] + 1) * bytes; at += VECTOR_BYTES) {
        __builtin_prefetch(p.scales + at);
        if (p.offsets) __builtin_prefetch(p.offsets + at);
      }
  }

  template <int MR, int NB>
  INLINE_MEMBER void add(IVec (&acc)[MR][NB], int n, const HeldCode* from, Codes codes) const {
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) acc[m][n] = dot(acc[m][n], from + m * stride, codes);
  }

  template <int MR, int NB, class F>
  static INLINE_MEMBER void for_all(F f) {
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 8
      for (int n = 0; n < NB; n++) f(m, n);
  }
};

// Rows of x in X, for weights with codes of the grid e4m3.
template <class X, bool GROUPED>
struct Float8Rows {
  using One = Term<Fp8<X>>;
  using Held = typename One::Held;
  static constexpr int AT_ONCE = GROUPED ? max(1, VECTORS_AT_ONCE / 2) : VECTORS_AT_ONCE;

  const CodeProduct& p;
  int64_t first, count, tile_bytes;
  Held* x;
  int64_t stride;

  static int64_t row_bytes(const CodeProduct& p) { return p.k * sizeof(Held); }

  Float8Rows(const CodeProduct& p, int64_t first, int64_t count, const Team& team)
      : p(p), first(first), count(count), tile_bytes(p.format.steps * VECTOR_BYTES) {
    stride = up_to(p.k, LANES) + LANES;  // rarely a power of two, so that rows do not share cache sets
    x = (Held*)team.scratch(count * stride * sizeof(Held));
    for (int64_t i = 0; i < count; i++) {
      memset((void*)(x + i * stride + p.k), 0, (stride - p.k) * sizeof(Held));
      hold((const X*)p.x + (first + i) * p.x_stride, x + i * stride, p.k);
    }
  }

  template <int MR, int NB>
  void multiply(const Panel& panel, int64_t row, Prefetch<NB> fetch) const {
    const Format& f = p.format;
    const char* w[NB];
    for (int n = 0; n < NB; n++) w[n] = p.weight + panel.tiles[n] * tile_bytes;
    Vec sums[MR][NB] = {};
    for (int64_t g = 0; g < f.groups; g++) {
      Vec acc[MR][NB] = {};
      int64_t end = min(f.steps, (g + 1) * f.each);
      for (int64_t s = g * f.each; s < end; s++) {
        fetch.step(w, s * VECTOR_BYTES);
        add_terms<One>(acc, x + row * stride + s * 4, stride, [&](int n) { return w[n] + s * VECTOR_BYTES; });
      }
#pragma GCC unroll 8
      for (int n = 0; n < NB; n++) {
        Vec scale = load_scales(f.type, p.scales, (panel.tiles[n] * f.groups + g) * 16);
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) sums[m][n] = GROUPED ? fma(acc[m][n], scale, sums[m][n]) : acc[m][n] * scale;
      }
    }
    finish_all<X>(p, panel, first + row, sums);
  }
};

template <class X>
static void multiply_float8(const CodeProduct& p, const Team& team) {
  p.format.groups > 1 ? with_vectors<Float8Rows<X, true>>(p, team) : with_vectors<Float8Rows<X, false>>(p, team);
}

}  // namespace

#if defined(HAS_TILES)
#include "code_tiles.h"
#endif

void multiply_codes(const CodeProduct& p, const Team& team) {
  if (p.format.grid == Grid::e4m3)
    return p.is_bf16 ? multiply_float8<bf16>(p, team) : multiply_float8<float>(p, team);
#if defined(HAS_TILES)
  if (fits_tiles(p)) return with_tiles<CodeBlock>(p, team);
#endif
  if (p.format.grid != Grid::integers)
    with_vectors<CodeRows<4, true, true>>(p, team);
  else if (p.format.bits == 4)
    with_vectors<CodeRows<4, true>>(p, team);
  else
    p.format.groups > 1 ? with_vectors<CodeRows<8, true>>(p, team) : with_vectors<CodeRows<8, false>>(p, team);
}

// x, weight, scales, offsets or null, bias or null, out, dtype of x, bias and out, the numbers of `format_of`, the sizes of
// `product_of`
void code_linear(const Arg* a, const Team& team) {
  CodeProduct p;
  (Product&)p = product_of(a, a + 1, a + 4, a + 5, a + 7 + FORMAT_NUMBERS);
  p.scales = (const char*)a[2].data;
  p.offsets = (const char*)a[3].data;
  p.format = format_of(a + 7, p.k);
  p.is_bf16 = a[6].integer;
  multiply_codes(p, team);
}

}  // namespace quire::ISA
