// Matrix products of low-bit weights: x (rows, k) in bf16 or float32 times a packed weight (n, k) of unsigned codes, see
// code_packing.cpp.
//
// Each row of x is rounded to 8 bits with one scale. The products of a group, or of all groups with the same factors, are
// added exactly, in integers, and these sums in order. So the result of a row does not depend on other rows, on threads or on
// whether tile registers are used.
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
// Rounds a row of x to codes, and returns its scale. totals: sums of the codes of each group, that of group g at g * stride.
float round_x(const CodeProduct& p, int64_t row, int8_t* codes, int32_t* totals, int64_t stride) {
  const Format& f = p.format;
  int64_t place = row * p.x_stride, padded = f.steps * f.terms;
  float scale =
      p.is_bf16 ? round_row((const bf16*)p.x + place, p.k, codes) : round_row((const float*)p.x + place, p.k, codes);
  for (int64_t g = 0; g < f.groups; g++) {
    int32_t total = 0;
    for (int64_t i = g * f.each * f.terms; i < min(padded, (g + 1) * f.each * f.terms); i++) total += codes[i];
    totals[g * stride] = total;
  }
  return scale;
}

// Rows of x as codes, for weights with codes of BITS bits. GROUPED: whether rows of the weight have several scales.
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
  int64_t first, count, tile_bytes;
  Held* x;
  float* scales;
  int32_t* totals;  // [groups][count]: see round_x
  int64_t stride;
  const int32_t zero;
  const Ints table;

  static int64_t row_bytes(const CodeProduct& p) { return p.k * sizeof(Held); }

  CodeRows(const CodeProduct& p, int64_t first, int64_t count, const Team& team)
      : p(p), first(first), count(count), tile_bytes(p.format.steps * STEP_BYTES), zero(p.format.zero()),
        table(TABLE ? biased_table(p.format.grid) : Ints{}) {
    int64_t groups = p.format.groups, padded = p.format.steps * TERMS;
    stride = up_to(padded, 64) + 32;  // rarely a power of two, so that rows do not share cache sets
    int64_t code_bytes = count * stride * sizeof(Held), row_bytes = up_to(padded, 64);
    char* memory = (char*)team.scratch(code_bytes + count * (groups + 1) * 4 + row_bytes);
    x = (Held*)memory;
    scales = (float*)(memory + code_bytes);
    totals = (int32_t*)(scales + count);
    auto codes = (int8_t*)(totals + count * groups);
    for (int64_t i = 0; i < count; i++) {
      scales[i] = round_x(p, first + i, codes, totals + i, count);
      if constexpr (SHORT)
        memcpy(x + i * stride, codes, padded);
      else
        hold_codes(codes, x + i * stride, padded);
    }
  }

  template <int MR, int NB>
  __attribute__((noinline)) void multiply(const Panel& panel, int64_t row, Prefetch fetch) const {
    auto finish = [&](const auto& sums) {
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
    if constexpr (FACTORS) {
      Factors factors(f);
      for (int64_t b = 0; b * factors.groups < f.groups; b++) add_block(sums, tiles, row, w, b, factors, fetch);
    } else {
      for (int64_t g = 0; g < f.groups; g++) add_group(sums, tiles, row, w, g, fetch);
    }
    for_all<MR, NB>([&](int m, int n) { sums[m][n] = opaque(sums[m][n] * splat(scales[row + m])); });
  }

  // Adds the products of a group to float sums.
  template <int MR, int NB>
  INLINE_MEMBER void add_group(Vec (&sums)[MR][NB], const int64_t* tiles, int64_t row, const char* const (&w)[NB],
                               int64_t g, Prefetch& fetch) const {
    const Format& f = p.format;
    const int32_t* group_totals = totals + g * count + row;
    IVec acc[MR][NB], ones[NB];
    for_all<MR, NB>([&](int m, int n) { acc[m][n] = splat_int(-zero * group_totals[m]); });
    for (int n = 0; n < NB; n++) ones[n] = splat_int(0x10001);
    add_steps(acc, row, w, g * f.each, min(f.steps, (g + 1) * f.each), ones, fetch);
#pragma GCC unroll 8
    for (int n = 0; n < NB; n++) {
      Vec scale = load_scales(f.type, p.scales, (tiles[n] * f.groups + g) * 16);
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++) sums[m][n] = fma(to_floats(acc[m][n]), scale, sums[m][n]);
    }
    if (p.offsets == nullptr) return;
    for (int n = 0; n < NB; n++) {
      Vec offset = load_scales(f.type, p.offsets, (tiles[n] * f.groups + g) * 16);
      for (int m = 0; m < MR; m++) sums[m][n] = fma(splat((float)group_totals[m]), offset, sums[m][n]);
    }
  }

  // Adds the products of the groups that share factors, which are a block. Their sums are integers.
  template <int MR, int NB>
  INLINE_MEMBER void add_block(Vec (&sums)[MR][NB], const int64_t* tiles, int64_t row, const char* const (&w)[NB],
                               int64_t block, const Factors& factors, Prefetch& fetch) const {
    const Format& f = p.format;
    const char* blocks[NB];
    for (int n = 0; n < NB; n++) blocks[n] = factors.block(p.scales, tiles[n], block);
    int64_t first_group = block * factors.groups;
    IVec total[MR][NB], moved[MR][NB];  // moved: by offsets
    for_all<MR, NB>([&](int m, int n) { total[m][n] = moved[m][n] = IVec{}; });
    for (int64_t place = 0; place < min(factors.groups, f.groups - first_group); place++) {
      int64_t g = first_group + place;
      const int32_t* group_totals = totals + g * count + row;
      int64_t begin = g * f.each, end = min(f.steps, (g + 1) * f.each);
      IVec scale[NB];
      for (int n = 0; n < NB; n++) scale[n] = load_bytes(factors.scales(blocks[n], place));
      if constexpr (SHORT) {
        IVec pairs[NB];
        for (int n = 0; n < NB; n++) pairs[n] = doubled(scale[n]);
        add_steps(total, row, w, begin, end, pairs, fetch);
        if (zero)
          for_all<MR, NB>([&](int m, int n) { total[m][n] += scale[n] * splat_int(-zero * group_totals[m]); });
      } else {
        IVec acc[MR][NB];
        for_all<MR, NB>([&](int m, int n) { acc[m][n] = splat_int(-zero * group_totals[m]); });
        add_steps(acc, row, w, begin, end, scale, fetch);
        for_all<MR, NB>([&](int m, int n) { total[m][n] += acc[m][n] * scale[n]; });
      }
      if (!factors.has_offsets) continue;
      for (int n = 0; n < NB; n++) {
        IVec offset = load_bytes(factors.offsets(blocks[n], place));
        for (int m = 0; m < MR; m++) moved[m][n] += offset * splat_int(group_totals[m]);
      }
    }
    for (int n = 0; n < NB; n++) {
      Vec factor = load(factors.factors(blocks[n]));
      for (int m = 0; m < MR; m++) sums[m][n] = fma(to_floats(total[m][n]), factor, sums[m][n]);
      if (!factors.has_offsets) continue;
      Vec offset_factor = load(factors.offset_factors(blocks[n]));
      for (int m = 0; m < MR; m++) sums[m][n] = fma(to_floats(moved[m][n]), offset_factor, sums[m][n]);
    }
  }

  // Computes the sums of tile n. They are in memory, so that registers have only the integers of a group, and more rows use
  // each vector of the weight.
  template <int MR, int NB>
  INLINE_MEMBER void add_groups(float (&sums)[MR][NB][LANES], int n, int64_t tile, int64_t row, Prefetch fetch) const {
    const Format& f = p.format;
    const char* w[1] = {p.weight + tile * tile_bytes};
    alignas(64) int32_t int_sums[MR][LANES], offset_sums[MR][LANES];  // of several flushes
    auto add_scaled = [&](int m, IVec numbers, Vec scale) {
      store(sums[m][n], fma(to_floats(numbers), scale, load(sums[m][n])));
    };
    auto add_integers = [&](const IVec(&numbers)[MR]) {
      in_memory(int_sums);
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++) store_bits(int_sums[m], load_bits<IVec>(int_sums[m]) + numbers[m]);
    };
    for (int m = 0; m < MR; m++) store(sums[m][n], Vec{});
    if constexpr (FACTORS) {
      Factors factors(f);
      for (int64_t first_group = 0; first_group < f.groups; first_group += factors.groups) {
        const char* block = factors.block(p.scales, tile, first_group / factors.groups);
        int64_t num_groups = min(factors.groups, f.groups - first_group);
        if (factors.has_offsets) add_totals(offset_sums, row, first_group, num_groups, factors.offsets(block, 0));
        if (zero) add_totals(int_sums, row, first_group, num_groups, factors.scales(block, 0));
        for (int m = 0; m < MR; m++)
          store_bits(int_sums[m], zero ? load_bits<IVec>(int_sums[m]) * splat_int(-zero) : IVec{});
        for (int64_t g = 0; g < num_groups; g++)
          add_group_to<MR, false>(row, w, first_group + g, load_bytes(factors.scales(block, g)), fetch, add_integers);
        in_memory(sums);
        Vec factor = load(factors.factors(block));
        for (int m = 0; m < MR; m++) add_scaled(m, load_bits<IVec>(int_sums[m]), factor);
        if (!factors.has_offsets) continue;
        Vec offset_factor = load(factors.offset_factors(block));
        for (int m = 0; m < MR; m++) add_scaled(m, load_bits<IVec>(offset_sums[m]), offset_factor);
      }
    } else {
      constexpr int ZERO_BITS = TABLE ? 7 : BITS - 1;  // zero is 1 << ZERO_BITS
      bool flush_once = !SHORT || f.each <= SHORT_STEPS;
      for (int64_t g = 0; g < f.groups; g++) {
        const int32_t* group_totals = totals + g * count + row;
        Vec scale = load_scales(f.type, p.scales, (tile * f.groups + g) * 16);
        // opaque: one load to all lanes, rather than a shift of the number before
        auto zeros = [&](int m) { return opaque(splat_int(group_totals[m])) << ZERO_BITS; };
        if (flush_once) {
          add_group_to<MR, true>(row, w, g, splat_int(1), fetch, [&](const IVec(&numbers)[MR]) {
            in_memory(sums);
#pragma GCC unroll 8
            for (int m = 0; m < MR; m++) add_scaled(m, numbers[m] - zeros(m), scale);
          });
        } else {
          for (int m = 0; m < MR; m++) store_bits(int_sums[m], -zeros(m));
          add_group_to<MR, false>(row, w, g, splat_int(1), fetch, add_integers);
          for (int m = 0; m < MR; m++) add_scaled(m, load_bits<IVec>(int_sums[m]), scale);
        }
        if (p.offsets == nullptr) continue;
        Vec offset = load_scales(f.type, p.offsets, (tile * f.groups + g) * 16);
        for (int m = 0; m < MR; m++) add_scaled(m, splat_int(group_totals[m]), offset);
      }
    }
    for (int m = 0; m < MR; m++) store(sums[m][n], opaque(load(sums[m][n]) * splat(scales[row + m])));
  }

  // Adds up the products of a group of MR rows and a tile, times an integer scale, by calls of add(numbers): one for each flush
  // of sums of 16 bits.
  template <int MR, bool FLUSH_ONCE, class F>
  INLINE_MEMBER void add_group_to(int64_t row, const char* const (&w)[1], int64_t group, IVec scale, Prefetch& fetch,
                                  F add) const {
    static_assert(BITS != 6);  // add_parts<0> has all terms of a step
    int64_t begin = group * p.format.each, end = min(p.format.steps, begin + p.format.each);
    IVec numbers[MR];
    if constexpr (SHORT) {
      IVec pairs = doubled(scale);
      for (int64_t s = begin; s < end;) {
        SVec some[MR][1];
        for_all<MR, 1>([&](int m, int n) { some[m][n] = SVec{}; });
        for (int64_t stop = FLUSH_ONCE ? end : min(end, s + SHORT_STEPS); s < stop; s++) add_parts<0>(some, row, w, s, fetch);
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) numbers[m] = add_pairs((IVec)some[m][0], pairs);
        add(numbers);
        if (FLUSH_ONCE) break;
      }
    } else {
      IVec acc[MR][1];
      for_all<MR, 1>([&](int m, int n) { acc[m][n] = IVec{}; });
      add_steps(acc, row, w, begin, end, {scale}, fetch);
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++) numbers[m] = FACTORS ? acc[m][0] * scale : acc[m][0];
      add(numbers);
    }
  }

  // Sums of the totals of `num_groups` groups of MR rows, each times the 16 bytes of its group: of pairs of groups at once,
  // since a total has less than 16 bits.
  template <int MR>
  INLINE_MEMBER void add_totals(int32_t (&sums)[MR][LANES], int64_t row, int64_t first_group, int64_t num_groups,
                                const int8_t* bytes) const {
    IVec acc[MR];
    for (int m = 0; m < MR; m++) acc[m] = IVec{};
    for (int64_t g = 0; g < num_groups; g += 2) {
      const int32_t* group_totals = totals + (first_group + g) * count + row;
      bool both = g + 1 < num_groups;
      IVec pair = (IVec)((UVec)load_bytes(bytes + g * 16) & 0xffffu);
      if (both) pair = (IVec)((UVec)pair | (UVec)load_bytes(bytes + (g + 1) * 16) << 16);
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++) {
        uint32_t low = (uint32_t)group_totals[m] & 0xffffu, high = both ? (uint32_t)group_totals[m + count] << 16 : 0;
        acc[m] += add_pairs(pair, splat_int((int32_t)(low | high)));
      }
    }
    for (int m = 0; m < MR; m++) store_bits(sums[m], acc[m]);
  }

  // Adds products of codes. times: with sums of 16 bits, pairs of numbers that they are multiplied by.
  template <int MR, int NB>
  INLINE_MEMBER void add_steps(IVec (&acc)[MR][NB], int64_t row, const char* const (&w)[NB], int64_t begin, int64_t end,
                               const IVec (&times)[NB], Prefetch& fetch) const {
    if constexpr (SHORT && BITS == 4) {
      SVec some[MR][NB];
      for_all<MR, NB>([&](int m, int n) { some[m][n] = SVec{}; });
      for (int64_t s = begin; s < end;) {
        for (int64_t stop = min(end, s + SHORT_STEPS); s < stop; s++) add_parts<0>(some, row, w, s, fetch);
        for_all<MR, NB>([&](int m, int n) { acc[m][n] += add_pairs((IVec)some[m][n], times[n]), some[m][n] = SVec{}; });
      }
    } else {
      for (int64_t s = begin; s < end; s++) {
        if constexpr (SHORT) {
          add_six_bit_terms<0>(acc, row, w, s, times, fetch);
          add_six_bit_terms<2>(acc, row, w, s, times, fetch);
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

  // The same for eight terms of codes of 6 bits: their sums of 16 bits, times `times`, are added at once.
  template <int PART, int MR, int NB>
  INLINE_MEMBER void add_six_bit_terms(IVec (&acc)[MR][NB], int64_t row, const char* const (&w)[NB], int64_t s,
                               const IVec (&times)[NB], Prefetch& fetch) const {
    const Held* from = x + row * stride + s * TERMS + PART * 4;
    fetch_part<PART>(w, fetch);
#pragma GCC unroll 8
    for (int n = 0; n < NB; n++) {
      const char* step = w[n] + s * STEP_BYTES;
      IVec first = codes_at<PART>(step, 0), second = codes_at<PART>(step, 1);
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++) {
        SVec sums = short_products(from + m * stride, first) + short_products(from + m * stride + 4, second);
        acc[m][n] = add_products(acc[m][n], add_pairs((IVec)sums, times[n]));
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
      p.format.groups > 1 ? with_vectors<CodeRows<8, true>>(p, team) : with_vectors<CodeRows<8, false>>(p, team);
  }
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
