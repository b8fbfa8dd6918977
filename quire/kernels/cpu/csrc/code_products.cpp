// Matrix products of low-bit weights: x (rows, k) in bf16 or float32 times a packed weight (n, k) of unsigned codes, see
// code_packing.cpp.
//
// Each row of x is rounded to 8 bits, with a scale for each of its groups, which are parts of the weight's groups. The
// products of a group of x are added exactly, in integers. Their sum is multiplied by the scales of x and of the weight, and
// groups are added in order, in float32. So the result of a row does not depend on other rows, on threads or on whether
// tile registers are used.
//
// Codes of the grid e4m3 are multiplied in floats with x as it is. The terms of a group are added in order, and groups in
// order.
#include "codes.h"
#include "factors.h"
#include "product_tiles.h"
#include "products.h"
#include "terms.h"

namespace quire::ISA {

namespace {
// Rows of x as codes with, for each group of x, a scale and what its sums begin with: minus the code of zero times the sum of
// the codes. For each group of the weight, the sum of x as it is rounded: offsets are multiplied by it.
struct RoundedRows {
  float *scales, *sums;  // [x_groups][rows], [groups][rows]
  int32_t* starts;       // [x_groups][rows]
  int64_t rows;

  static int64_t bytes(const Format& f, int64_t rows) { return (2 * f.x_groups + f.groups) * rows * 4; }

  RoundedRows(const Format& f, int64_t rows, char* memory)
      : scales((float*)memory), sums(scales + f.x_groups * rows), starts((int32_t*)(sums + f.groups * rows)), rows(rows) {}

  // codes: memory for those of a row of x, padded, and for 16 more.
  void round(const CodeProduct& p, int64_t row, int8_t* codes, int64_t index) {
    p.is_bf16 ? round((const bf16*)p.x + row * p.x_stride, p, codes, index)
              : round((const float*)p.x + row * p.x_stride, p, codes, index);
  }

 private:
  template <class T>
  void round(const T* x, const CodeProduct& p, int8_t* codes, int64_t index) {
    const Format& f = p.format;
    int64_t size = f.x_each * f.terms, parts = f.each / f.x_each;
    int32_t zero = f.zero();
    for (int64_t g = 0; g < f.groups; g++) sums[g * rows + index] = 0.0f;
    for (int64_t h = 0; h < f.x_groups; h++) {
      int32_t total;
      int64_t place = h * rows + index, first = h * size;
      scales[place] = round_row(x + first, min(size, p.k - first), codes + first, &total);
      starts[place] = -zero * total;
      sums[(f.groups == 1 ? 0 : h / parts) * rows + index] += scales[place] * (float)total;
    }
  }
};

// Rows of x as codes, for weights with codes of BITS bits. GROUPED: whether the sums of each group are multiplied by its scale.
// TABLE: whether codes are looked up. FACTORS: whether scales have factors.
// The sums of up to AT_ONCE rows stay in registers over all of k (add_tiles). If TILE_ROWS is larger, the sums of more rows are
// in memory (add_groups): without AVX-512, if the weight has several scales for each row and not 6 bits.
template <int BITS, bool GROUPED, bool TABLE = false, bool FACTORS = false>
struct CodeRows {
  static constexpr bool SHORT = HAS_SHORT_SUMS && BITS < 8 && !TABLE;
  static constexpr int AT_ONCE = GROUPED ? max(1, VECTORS_AT_ONCE / 2) : VECTORS_AT_ONCE;
  static constexpr bool TILE_BY_TILE = REGISTER_BYTES < 64;
  static constexpr int TILE_ROWS = TILE_BY_TILE && BITS != 6 ? VECTORS_AT_ONCE : AT_ONCE;
  static constexpr bool REPEAT = REGISTER_BYTES == 64;
  static constexpr int FEW_ROWS = REGISTER_BYTES < 64 ? 2 : 8;  // whose sums leave registers for all parts of four terms
  static constexpr int TERMS = BITS == 6 ? 16 : 32 / BITS, STEP_BYTES = (BITS == 6 ? 3 : 1) * VECTOR_BYTES;
  using Held = std::conditional_t<SHORT, int8_t, CodeTerm::Held>;
  static constexpr int SHORT_STEPS = 4;  // between flushes, of codes of 4 bits

  const CodeProduct& p;
  int64_t first, count, tile_bytes, stride;
  Held* x;
  RoundedRows rounded;
  const Ints table;

  static int64_t row_bytes(const CodeProduct& p) { return p.k * sizeof(Held); }

  CodeRows(const CodeProduct& p, int64_t first, int64_t count, const Team& team)
      : p(p), first(first), count(count), tile_bytes(p.format.steps * STEP_BYTES),
        stride(up_to(p.format.steps * TERMS, 64) + 32),  // rarely a power of two, so that rows do not share cache sets
        x((Held*)team.scratch(count * stride * sizeof(Held) + RoundedRows::bytes(p.format, count) + stride)),
        rounded(p.format, count, (char*)(x + count * stride)), table(TABLE ? biased_table(p.format.grid) : Ints{}) {
    int64_t padded = p.format.steps * TERMS;
    auto codes = (int8_t*)(x + count * stride) + RoundedRows::bytes(p.format, count);
    for (int64_t i = 0; i < count; i++) {
      rounded.round(p, first + i, codes, i);
      if constexpr (SHORT)
        memcpy(x + i * stride, codes, padded);
      else
        hold_codes(codes, x + i * stride, padded);
    }
  }

  template <int MR, int NB>
  __attribute__((noinline)) void multiply(const Panel& panel, int64_t row, Prefetch fetch) const {
    auto finish = [&](auto& sums) {
      p.is_bf16 ? finish_all<bf16>(p, panel, first + row, sums) : finish_all<float>(p, panel, first + row, sums);
    };
    if constexpr (MR * NB <= AT_ONCE) {
      Vec sums[MR][NB];
      add_tiles(sums, panel.tiles, row, fetch);
      finish(sums);
    } else {
      alignas(64) float sums[MR][NB][LANES];
      if constexpr (MR <= AT_ONCE)
        tile_by_tile(*this, panel, row, fetch, sums);
      else
        for (int n = 0; n < NB; n++) add_groups(sums, n, panel.tiles[n], row, fetch);
      finish(sums);
    }
  }

  // Computes the sums of NB tiles.
  template <int MR, int NB>
  INLINE_MEMBER void add_tiles(Vec (&sums)[MR][NB], const int64_t* tiles, int64_t row, Prefetch& fetch) const {
    const Format& f = p.format;
    const char* w[NB];
    for (int n = 0; n < NB; n++) w[n] = p.weight + tiles[n] * tile_bytes;
    for_all<MR, NB>([&](int m, int n) { sums[m][n] = Vec{}; });
    for (int64_t g = 0, h = 0; g < f.groups; g++) {
      Vec scale[NB];
      for (int n = 0; GROUPED && n < NB; n++) scale[n] = scale_of(tiles[n], g);
      int64_t end = min(f.steps, (g + 1) * f.each);
      for (int64_t s = g * f.each; s < end; s += f.x_each, h++) {
        IVec acc[MR][NB];
        for_all<MR, NB>([&](int m, int n) { acc[m][n] = splat_int(rounded.starts[h * count + row + m]); });
        add_steps(acc, row, w, s, min(end, s + f.x_each), fetch);
        for_all<MR, NB>([&](int m, int n) {
          Vec x_scale = splat(rounded.scales[h * count + row + m]);
          sums[m][n] = GROUPED ? fma(to_floats(acc[m][n]) * x_scale, scale[n], sums[m][n])
                               : fma(to_floats(acc[m][n]), x_scale, sums[m][n]);
        });
      }
      if (!GROUPED)
        for_all<MR, NB>([&](int m, int n) { sums[m][n] = opaque(sums[m][n] * scale_of(tiles[n], 0)); });
      if (!has_offsets()) continue;
      for (int n = 0; n < NB; n++) {
        Vec offset = offset_of(tiles[n], g);
        for (int m = 0; m < MR; m++) sums[m][n] = fma(splat(rounded.sums[g * count + row + m]), offset, sums[m][n]);
      }
    }
  }

  bool has_offsets() const { return FACTORS ? p.format.type == ScaleType::factored_with_offsets : p.offsets != nullptr; }
  INLINE_MEMBER Vec scale_of(int64_t tile, int64_t group) const {
    if constexpr (!FACTORS) return load_scales(p.format.type, p.scales, (tile * p.format.groups + group) * 16);
    Factors factors(p.format);
    const char* block = factors.block(p.scales, tile, group / factors.groups);
    return to_floats(load_bytes(factors.scales(block, group % factors.groups))) * load(factors.factors(block));
  }
  INLINE_MEMBER Vec offset_of(int64_t tile, int64_t group) const {
    if constexpr (!FACTORS) return load_scales(p.format.type, p.offsets, (tile * p.format.groups + group) * 16);
    Factors factors(p.format);
    const char* block = factors.block(p.scales, tile, group / factors.groups);
    return to_floats(load_bytes(factors.offsets(block, group % factors.groups))) * load(factors.offset_factors(block));
  }

  // Computes the sums of tile n. They are in memory, so that registers have only the integers of a group, and more rows use
  // each vector of the weight.
  template <int MR, int NB>
  INLINE_MEMBER void add_groups(float (&sums)[MR][NB][LANES], int n, int64_t tile, int64_t row, Prefetch fetch) const {
    const Format& f = p.format;
    const char* w[1] = {p.weight + tile * tile_bytes};
    for (int m = 0; m < MR; m++) store(sums[m][n], Vec{});
    for (int64_t g = 0, h = 0; g < f.groups; g++) {
      Vec scale = scale_of(tile, g);
      int64_t end = min(f.steps, (g + 1) * f.each);
      for (int64_t s = g * f.each; s < end; s += f.x_each, h++) {
        IVec acc[MR][1];
        add_group(acc, row, w, s, min(end, s + f.x_each), fetch);
        in_memory(sums);
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) {
          int64_t place = h * count + row + m;
          // opaque: one load to all lanes
          Vec some = to_floats(acc[m][0] + opaque(splat_int(rounded.starts[place]))) * splat(rounded.scales[place]);
          store(sums[m][n], fma(some, scale, load(sums[m][n])));
        }
      }
      if (!has_offsets()) continue;
      Vec offset = offset_of(tile, g);
      for (int m = 0; m < MR; m++)
        store(sums[m][n], fma(splat(rounded.sums[g * count + row + m]), offset, load(sums[m][n])));
    }
  }

  // Computes the products of a group of x, MR rows and a tile.
  template <int MR>
  INLINE_MEMBER void add_group(IVec (&acc)[MR][1], int64_t row, const char* const (&w)[1], int64_t begin, int64_t end,
                               Prefetch& fetch) const {
    static_assert(BITS != 6);  // add_parts<0> has all terms of a step
    if constexpr (SHORT) {
      if (end - begin <= SHORT_STEPS) {
        SVec some[MR][1];
        for_all<MR, 1>([&](int m, int n) { some[m][n] = SVec{}; });
        for (int64_t s = begin; s < end; s++) add_parts<0>(some, row, w, s, fetch);
        for_all<MR, 1>([&](int m, int n) { acc[m][n] = add_pairs((IVec)some[m][n], splat_int(0x10001)); });
        return;
      }
    }
    for_all<MR, 1>([&](int m, int n) { acc[m][n] = IVec{}; });
    add_steps(acc, row, w, begin, end, fetch);
  }

  // Adds products of codes.
  template <int MR, int NB>
  INLINE_MEMBER void add_steps(IVec (&acc)[MR][NB], int64_t row, const char* const (&w)[NB], int64_t begin, int64_t end,
                               Prefetch& fetch) const {
    if constexpr (SHORT && BITS == 4) {
      SVec some[MR][NB];
      for_all<MR, NB>([&](int m, int n) { some[m][n] = SVec{}; });
      for (int64_t s = begin; s < end;) {
        for (int64_t stop = min(end, s + SHORT_STEPS); s < stop; s++) add_parts<0>(some, row, w, s, fetch);
        for_all<MR, NB>([&](int m, int n) {
          acc[m][n] += add_pairs((IVec)some[m][n], splat_int(0x10001));
          some[m][n] = SVec{};
        });
      }
    } else {
      for (int64_t s = begin; s < end; s++) {
        if constexpr (SHORT) {
          add_six_bit_terms<0>(acc, row, w, s, fetch);
          add_six_bit_terms<2>(acc, row, w, s, fetch);
        } else {
          add_parts<0>(acc, row, w, s, fetch);
          if constexpr (BITS == 6) add_parts<2>(acc, row, w, s, fetch);
        }
      }
    }
  }

  // Adds the products of four terms of a step, or of eight if codes have less than 8 bits. PART: the first four.
  template <int PART, class Sum, int MR, int NB>
  INLINE_MEMBER void add_parts(Sum (&acc)[MR][NB], int64_t row, const char* const (&w)[NB], int64_t s,
                               Prefetch& fetch) const {
    const Held* from = x + row * stride + s * TERMS + PART * 4;
    fetch_part<PART>(w, fetch);
#pragma GCC unroll 8
    for (int n = 0; n < NB; n++) {
      const char* step = w[n] + s * STEP_BYTES;
      if constexpr (BITS == 8) {
        IVec bytes = load_bits<IVec>(step);
        add_codes(acc, n, from, [&] {
          return MR <= FEW_ROWS ? bytes : load_bits<IVec>(step = after(step, acc[MR - 1][n]));
        });
      } else {
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++) {
          if (MR > AT_ONCE && part == 1) step = after(step, acc[MR - 1][n]);
          IVec codes = codes_at<PART>(step, part);
          add(acc, n, from + part * 4, TABLE ? look_up(table, codes) : codes);
        }
      }
      if (NB > 1) one_after_another();
    }
  }

  // The same for eight terms of codes of 6 bits: their sums of 16 bits are added at once.
  template <int PART, int MR, int NB>
  INLINE_MEMBER void add_six_bit_terms(IVec (&acc)[MR][NB], int64_t row, const char* const (&w)[NB], int64_t s,
                                       Prefetch& fetch) const {
    const Held* from = x + row * stride + s * TERMS + PART * 4;
    fetch_part<PART>(w, fetch);
#pragma GCC unroll 8
    for (int n = 0; n < NB; n++) {
      const char* step = w[n] + s * STEP_BYTES;
      IVec first = codes_at<PART>(step, 0), second = codes_at<PART>(step, 1);
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++) {
        SVec sums = short_products(from + m * stride, first) + short_products(from + m * stride + 4, second);
        acc[m][n] = add_products(acc[m][n], add_pairs((IVec)sums, splat_int(0x10001)));
      }
    }
  }

  template <int PART, int NB>
  INLINE_MEMBER void fetch_part(const char* const (&w)[NB], Prefetch& fetch) const {
    fetch.step<REPEAT>(w);
    if (BITS == 6 && PART == 2) fetch.step<REPEAT>(w);  // a step has three vectors
  }

  template <int PART>
  INLINE_MEMBER IVec codes_at(const char* step, int part) const {
    UVec bytes = load_bits<UVec>(step + PART / 2 * VECTOR_BYTES);
    return BITS == 6 ? six_bits(bytes, load_bits<UVec>(step + 2 * VECTOR_BYTES), PART + part) : nibbles(bytes, part);
  }

  template <class Sum, int MR, int NB>
  INLINE_MEMBER void add(Sum (&acc)[MR][NB], int n, const Held* from, IVec codes) const {
    if constexpr (SHORT) {
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++) {
        SVec products = short_products(from + m * stride, codes);
        acc[m][n] = MR > AT_ONCE ? add_products(acc[m][n], products) : opaque(acc[m][n] + products);
      }
    } else {
      add_codes(acc, n, from, [&] { return codes; });
    }
  }

  // codes(): four terms, read for each part of them, so that the parts do not need registers at the same time.
  template <int MR, int NB, class F>
  INLINE_MEMBER void add_codes(IVec (&acc)[MR][NB], int n, const Held* from, F codes) const {
#pragma GCC unroll 2
    for (int i = 0; i < CodeTerm::parts; i++) {
      IVec part = CodeTerm::part(codes(), i);
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++) {
        const Held* terms = from + m * stride + i * 2;
        acc[m][n] = MR <= FEW_ROWS ? CodeTerm::dot(acc[m][n], terms, part) : CodeTerm::dot_in_place(acc[m][n], terms, part);
      }
    }
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
  static constexpr bool TILE_BY_TILE = false;
  static constexpr int TILE_ROWS = AT_ONCE;

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
  __attribute__((noinline)) void multiply(const Panel& panel, int64_t row, Prefetch fetch) const {
    const Format& f = p.format;
    const char* w[NB];
    for (int n = 0; n < NB; n++) w[n] = p.weight + panel.tiles[n] * tile_bytes;
    Vec sums[MR][NB] = {};
    for (int64_t g = 0; g < f.groups; g++) {
      Vec acc[MR][NB] = {};
      int64_t end = min(f.steps, (g + 1) * f.each);
      for (int64_t s = g * f.each; s < end; s++) {
        fetch.step<true>(w);
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
  bool is_grid = p.format.grid != Grid::integers, has_factors = p.format.has_factors();
  switch (p.format.bits) {
    case 4:
      if (is_grid)
        return has_factors ? with_vectors<CodeRows<4, true, true, true>>(p, team)
                           : with_vectors<CodeRows<4, true, true>>(p, team);
      return has_factors ? with_vectors<CodeRows<4, true, false, true>>(p, team)
                         : with_vectors<CodeRows<4, true>>(p, team);
    case 6:
      return has_factors ? with_vectors<CodeRows<6, true, false, true>>(p, team)
                         : with_vectors<CodeRows<6, true>>(p, team);
    default:
      p.format.scaled_at_end() ? with_vectors<CodeRows<8, false>>(p, team) : with_vectors<CodeRows<8, true>>(p, team);
  }
}

// x, weight, scales, offsets or null, bias or null, out, dtype of x, bias and out, the numbers of `format_of`, the sizes of
// `product_of`, the numbers of `adapters_of`
void code_linear(const Arg* a, const Team& team) {
  CodeProduct p;
  (Product&)p = product_of(a, a + 1, a + 4, a + 5, a + 7 + FORMAT_NUMBERS);
  p.adapters = adapters_of(a + 7 + FORMAT_NUMBERS + 6);
  p.scales = (const char*)a[2].data;
  p.offsets = (const char*)a[3].data;
  p.format = format_of(a + 7, p.k);
  p.is_bf16 = a[6].integer;
  multiply_codes(p, team);
}

}  // namespace quire::ISA
