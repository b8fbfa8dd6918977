// Matrix products of low-bit weights: x (rows, k) in bf16 or float32 times a packed weight (n, k) of unsigned codes.
//
// A weight's value is scale * (code - zero), zero 128 for codes of 8 bits and 8 for codes of 4. The scales are one
// float32 for each row, or one bf16 for each group of columns of a row. A vector of a tile (see products.h) has codes of
// 8 bits [16][4] of 4 terms, or of 4 bits [16][4] of 8 terms: the low halves of the bytes are the first four terms.
// Each row of x is rounded to 8 bits with one scale. The products of a group are added exactly, in integers, and groups
// in order. So the result of a row does not depend on other rows or on threads.
#include <type_traits>

#include "codes.h"
#include "products.h"
#include "terms.h"

namespace quire::ISA {

// How the codes of a weight are stored.
struct Format {
  int64_t bits;
  int64_t terms;   // of a vector and a column: 4 or 8
  int64_t steps;   // vectors of a tile
  int64_t groups;  // scales of a row
  int64_t each;    // vectors of a group
};

INLINE Format format_of(int64_t bits, int64_t group_size, int64_t k) {
  int64_t terms = 32 / bits, steps = (k + terms - 1) / terms;
  int64_t each = group_size ? group_size / terms : steps;
  return {bits, terms, steps, (steps + each - 1) / each, each};
}

// ---- packing ----

// Writes rows [start, start + n) of a packed weight: the caller has zeroed them.
// source uint8 (n, k), target, bits, n, k, start
void pack_codes(const Arg* a, const Team& team) {
  auto source = (const uint8_t*)a[0].data;
  auto target = (uint8_t*)a[1].data;
  int64_t n = a[3].integer, k = a[4].integer, start = a[5].integer, begin, end;
  Format f = format_of(a[2].integer, 0, k);
  int64_t first_tile = start / 16;
  team.share((start + n + 15) / 16 - first_tile, 1, &begin, &end);
  for (int64_t tile = first_tile + begin; tile < first_tile + end; tile++) {
    int64_t before = tile * 16 - start;  // first source row of the tile; negative if the tile begins before the source
    for (int64_t i = max(0, -before); i < min(16, n - before); i++) {
      const uint8_t* row = source + (before + i) * k;
      uint8_t* out = target + tile * f.steps * VECTOR_BYTES + i * 4;
      for (int64_t column = 0; column < k; column++) {
        int64_t term = column % f.terms;
        out[column / f.terms * VECTOR_BYTES + term % 4] |= row[column] << term / 4 * 4;
      }
    }
  }
}

// Rows of a packed weight, times `scale`: for embeddings, and to unpack a weight.
// weight, scales, ids (count,) int64, target (count, k), dtype, count, k, n (other ids give zeros), bits, group size,
// scale
template <class T, class Scale>
static void unpack(const Arg* a, const Team& team) {
  auto weight = (const uint8_t*)a[0].data;
  auto scales = (const Scale*)a[1].data;
  auto ids = (const int64_t*)a[2].data;
  auto target = (T*)a[3].data;
  int64_t count = a[5].integer, k = a[6].integer, n = a[7].integer, begin, end;
  Format f = format_of(a[8].integer, a[9].integer, k);
  float factor = (float)a[10].number;
  int32_t zero = 1 << (f.bits - 1);
  team.share(count, 1, &begin, &end);
  for (int64_t i = begin; i < end; i++) {
    int64_t row = ids[i];
    if (row < 0 || row >= n) {
      memset(target + i * k, 0, k * sizeof(T));
      continue;
    }
    const uint8_t* from = weight + row / 16 * f.steps * VECTOR_BYTES + row % 16 * 4;
    const Scale* from_scales = scales + row / 16 * f.groups * 16 + row % 16;
    for (int64_t column = 0; column < k; column++) {
      int64_t step = column / f.terms, term = column % f.terms;
      int32_t code = (from[step * VECTOR_BYTES + term % 4] >> term / 4 * 4) & ((1 << f.bits) - 1);
      put(target + i * k + column, (float)(code - zero) * to_float(from_scales[step / f.each * 16]) * factor);
    }
  }
}

void unpack_codes(const Arg* a, const Team& team) {
  if (a[9].integer)
    a[4].integer ? unpack<bf16, bf16>(a, team) : unpack<float, bf16>(a, team);
  else
    a[4].integer ? unpack<bf16, float>(a, team) : unpack<float, float>(a, team);
}

// ---- products ----

struct CodeProduct : Product {
  const char* scales;
  Format format;
  bool is_bf16;  // x, bias and out
};

// Rows of x as codes, for weights with codes of BITS bits.
template <int BITS>
struct CodeRows {
  static constexpr bool GROUPED = BITS == 4;
  using Scale = typename std::conditional<GROUPED, bf16, float>::type;
  static constexpr int AT_ONCE = GROUPED ? max(1, VECTORS_AT_ONCE / 2) : VECTORS_AT_ONCE;
  static constexpr int TERMS = 32 / BITS, ZERO = 1 << (BITS - 1);

  const CodeProduct& p;
  int64_t first, count, tile_bytes;
  HeldCode* x;
  float* scales;
  int32_t* corrections;  // [count][groups]: what the zero of the codes adds to the sums of a group, negated
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
      int64_t place = (first + i) * p.x_stride;
      scales[i] = p.is_bf16 ? round_row((const bf16*)p.x + place, p.k, codes) : round_row((const float*)p.x + place, p.k, codes);
      hold_codes(codes, x + i * stride, padded);
      for (int64_t g = 0; g < groups; g++) {
        int64_t begin = g * p.format.each * TERMS, end = min(padded, begin + p.format.each * TERMS);
        int32_t total = 0;
        for (int64_t j = begin; j < end; j++) total += codes[j];
        corrections[i * groups + g] = -ZERO * total;
      }
    }
  }

  template <int MR, int NB>
  void multiply(const Panel& panel, int64_t row, Prefetch<NB> fetch) const {
    const Format& f = p.format;
    const HeldCode* from = x + row * stride;
    const int32_t* begin_at = corrections + row * f.groups;
    const char* w[NB];
    const Scale* by[NB];
    for (int n = 0; n < NB; n++) {
      w[n] = p.weight + panel.tiles[n] * tile_bytes;
      by[n] = (const Scale*)p.scales + panel.tiles[n] * f.groups * 16;
    }
    if (GROUPED && row == 0) {
      int64_t scale_bytes = f.groups * 16 * sizeof(Scale);
      for (int n = 0; n < NB; n++)
        for (int64_t at = 0; at < scale_bytes; at += VECTOR_BYTES)
          __builtin_prefetch(p.scales + fetch.panel.tiles[n] * scale_bytes + at);
    }
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
            add<MR, NB>(acc, n, from + s * 8, codes_of((IVec)((UVec)bytes & 0x0f0f0f0fu)));
            add<MR, NB>(acc, n, from + s * 8 + 4, codes_of((IVec)(((UVec)bytes >> 4) & 0x0f0f0f0fu)));
          }
          if (NB > 1) one_after_another();
        }
      }
      for_all<MR, NB>([&](int m, int n) { sums[m][n] = fma(to_floats(acc[m][n]), load(by[n] + g * 16), sums[m][n]); });
    }
    for_all<MR, NB>([&](int m, int n) { sums[m][n] *= splat(scales[row + m]); });
    p.is_bf16 ? finish_all<bf16>(p, panel, first + row, sums) : finish_all<float>(p, panel, first + row, sums);
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

// x, weight, scales, bias, out, dtype of x, bias and out, bits, group size (0: a row), the sizes of `product_of`
void code_linear(const Arg* a, const Team& team) {
  CodeProduct p;
  (Product&)p = product_of(a, a + 1, a + 3, a + 4, a + 8);
  p.scales = (const char*)a[2].data;
  p.format = format_of(a[6].integer, a[7].integer, p.k);
  p.is_bf16 = a[5].integer;
  p.format.bits == 4 ? with_vectors<CodeRows<4>>(p, team) : with_vectors<CodeRows<8>>(p, team);
}

}  // namespace quire::ISA
