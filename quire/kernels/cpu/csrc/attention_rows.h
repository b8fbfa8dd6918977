// One step of attention for a few rows, in vector code: scores of up to STEP_TOKENS keys, the update of the online
// softmax, the weighted sums of values. The keys and values that are needed next are prefetched.
#pragma once
#include "attention_items.h"
#include "codes.h"

namespace quire::ISA {

// 2^x for x up to 0 or slightly above: exactly 0 below -126, NaN for NaN. The relative error is up to 8e-5 for weights
// of values in bf16 or 8 bits, which is small compared with the rounding of these, and 2e-7 otherwise.
template <class T>
INLINE Vec power_of_two(Vec x) {
#if !defined(__AVX512F__)
  x = vmax(splat(-200.0f), x);
#endif
  Vec n = round_to_int(x), f = x - n, p;
  if (sizeof(T) <= sizeof(bf16)) {
    p = fma(splat(5.51716527e-02f), f, splat(2.42611121e-01f));
    p = fma(p, f, splat(6.93260988e-01f));
    p = fma(p, f, splat(9.99928074e-01f));
  } else {
    p = fma(splat(1.5403530e-4f), f, splat(1.3333558e-3f));
    p = fma(p, f, splat(9.6181291e-3f));
    p = fma(p, f, splat(5.5504109e-2f));
    p = fma(p, f, splat(2.4022651e-1f));
    p = fma(p, f, splat(6.9314718e-1f));
    p = fma(p, f, splat(1.0f));
  }
#if defined(__AVX512F__)
  // denormal results would take the processor about a hundred times as long
  __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return (Vec)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)n);
#else
  IVec exponent = to_ints(vmax(splat(-126.0f), n));
  return select(n < -126.0f, Vec{}, p * (Vec)((exponent + 127) << 23));
#endif
}

// Terms of scores. Keys of int8 are stored as unsigned codes, as those of weights, and queries are rounded like rows of x.
template <class T>
struct ScoreTerm : Term<T> {};
template <>
struct ScoreTerm<int8_t> {
  using Held = CodeTerm::Held;
  using Sum = IVec;
  static constexpr int width = 4, parts = 1;
  INLINE IVec part(const char* y, int) { return load_bits<IVec>(y); }
  INLINE IVec dot(IVec acc, const Held* x, IVec y) {
    for (int i = 0; i < CodeTerm::parts; i++) acc = CodeTerm::dot(acc, x + i * 2, CodeTerm::part(y, i));
    return acc;
  }
};
constexpr int32_t ZERO_CODE = 128;  // of keys

template <class T>
constexpr bool IS_INTEGER = false;
template <>
constexpr bool IS_INTEGER<int8_t> = true;

INLINE Vec capped(Vec score, float softcap) { return softcap * tanh(score * (1.0f / softcap)); }

// The number of vectors of sums per row that fit into registers.
constexpr int wide(int rows) {
  int count = 1;
  while (2 * count * rows <= VECTORS_AT_ONCE && count < 8) count *= 2;
  return count;
}

struct Span {
  const int64_t* places;  // byte offsets of its parts
  const int64_t* coming;  // byte offsets of the parts that are needed next, or null
  int64_t parts;
};

// Into the second cache: the first one is too small for two steps.
INLINE void fetch(const char* line) { __builtin_prefetch(line, 0, 2); }

INLINE Vec as_floats(Vec v) { return v; }
INLINE Vec as_floats(IVec v) { return to_floats(v); }

// Scores of MR rows of q and the keys of NB parts, without the scales of q and of keys.
template <class T, int MR, int NB>
INLINE void score(const Attention& a, const typename ScoreTerm<T>::Held* q, const int32_t* begin, const int64_t* places,
                  const int64_t* coming, float* scores) {
  using Sum = typename ScoreTerm<T>::Sum;
  const char *keys[NB], *ahead[NB];
  Sum acc[MR][NB];
  for (int n = 0; n < NB; n++) {
    keys[n] = a.keys + places[n];
    ahead[n] = coming ? a.keys + coming[n] : nullptr;
    for (int m = 0; m < MR; m++) {
      if constexpr (IS_INTEGER<T>)
        acc[m][n] = splat_int(begin[m]);
      else
        acc[m][n] = Sum{};
    }
    if (HAS_SCALES<T> && coming) fetch(ahead[n] + a.scales_at);
  }
  constexpr int64_t width = ScoreTerm<T>::width;
  int64_t steps = (a.head_dim + width - 1) / width;
  for (int64_t s = 0; s < steps; s++) {
    if (coming)
#pragma GCC unroll 8
      for (int n = 0; n < NB; n++) fetch(ahead[n] + s * 64);
    add_terms<ScoreTerm<T>>(acc, q + s * width, a.padded, [&](int n) { return keys[n] + s * 64; });
  }
  for (int m = 0; m < MR; m++)
    for (int n = 0; n < NB; n++) store(scores + m * STEP_TOKENS + n * 16, as_floats(acc[m][n]));
}

// sums (MR, padded) = sums * rescale + weights * values, for NV vectors of dimensions from `column` on. Weights that are
// integers are multiplied by `units`.
template <class T, class One, int MR, int NV>
INLINE void weigh(const Attention& a, const typename One::Held* weights, const Span& span, int64_t column,
                  const float* rescale, const float* units, float* sums) {
  using Sum = typename One::Sum;
  constexpr int64_t width = One::width, steps = PART_TOKENS / width;
  int64_t row_bytes = a.padded * 4;
  Sum acc[MR][NV];
  auto before = [&](int m, int n) { return load(sums + m * a.padded + column + n * 16) * rescale[m]; };
  for (int m = 0; m < MR; m++)
    for (int n = 0; n < NV; n++) {
      if constexpr (IS_INTEGER<T>)
        acc[m][n] = Sum{};
      else
        acc[m][n] = before(m, n);
    }
  for (int64_t part = 0; part < span.parts; part++) {
    const char* values = a.values + span.places[part] + column * 4;
    const char* ahead = span.coming ? a.values + span.coming[part] + column * 4 : nullptr;
    const auto* w = weights + part * PART_TOKENS;
    if (HAS_SCALES<T> && ahead && column == 0) fetch(ahead + a.scales_at);
    for (int64_t s = 0; s < steps; s++) {
      if (ahead)
#pragma GCC unroll 8
        for (int n = 0; n < NV; n++) fetch(ahead + s * row_bytes + n * 64);
      const char* now = values + s * row_bytes;
      add_terms<One>(acc, w + s * width, STEP_TOKENS, [&](int n) { return now + n * 64; });
    }
  }
  for (int m = 0; m < MR; m++)
    for (int n = 0; n < NV; n++) {
      Vec total = as_floats(acc[m][n]);
      if (IS_INTEGER<T>) total = fma(total, splat(units[m]), before(m, n));
      store(sums + m * a.padded + column + n * 16, total);
    }
}

// The positions [from, to) that a row attends to, relative to the first of a step.
struct Seen {
  int32_t from, to;
};

INLINE Vec scales_of(const Attention& a, const char* part) { return load((const float*)(part + a.scales_at)); }

// Scales, caps and masks scores in place. Returns the lanewise maxima.
template <class T>
INLINE Vec prepare(const Attention& a, float* scores, const Span& span, float scale, Seen seen) {
  Vec top = splat(-__builtin_inff());
  int64_t parts = span.parts;
  bool masked = seen.from > 0 || seen.to < parts * 16;
  for (int64_t i = 0; i < parts; i++) {
    Vec s = load(scores + i * 16) * scale;
    if (HAS_SCALES<T>) s *= scales_of(a, a.keys + span.places[i]);
    if (a.softcap > 0) s = capped(s, a.softcap);
    if (masked) {
      IVec place = lane_numbers() + (int32_t)(i * 16);
      s = select((place >= seen.from) & (place < seen.to), s, splat(-__builtin_inff()));
    }
    store(scores + i * 16, s);
    top = vmax(top, s);
  }
  return top;
}

// ---- softmax weights as integers ----

constexpr float LARGEST_SHORT = 32767.0f, LARGEST_BYTE = 255.0f;
// Bytes are precise enough for a step whose largest weight times this number is at most the sum of all weights so far.
constexpr float COARSE_FROM = 64.0f;

// Weights are rounded to bytes up or down by their place in a step, at thresholds that are spread evenly (by the golden
// ratio). So the sum over many small weights stays right, each of which would become 0 if it were rounded to the nearest.
struct Thresholds {
  float of_place[STEP_TOKENS];
  constexpr Thresholds() : of_place() {
    for (int i = 0; i < STEP_TOKENS; i++) {
      double x = i * 0.6180339887498949;
      of_place[i] = (float)(x - (int)x - 0.5);
    }
  }
};

// Values times weights of 8 bits, twice as fast as with 16 bits.
struct CoarseTerm {
  using Held = uint8_t;  // in the order of four bytes of values
  using Sum = IVec;
  static constexpr int width = 4, parts = 1;
  INLINE IVec part(const char* y, int) { return load_bits<IVec>(y); }
  INLINE IVec dot([[maybe_unused]] IVec acc, [[maybe_unused]] const uint8_t* x, [[maybe_unused]] IVec y) {
#if defined(__AVX512VNNI__)
    int32_t four;
    memcpy(&four, x, 4);
    return (IVec)_mm512_dpbusd_epi32((__m512i)acc, _mm512_set1_epi32(four), (__m512i)y);
#else
    return acc;  // not used: products of bytes are not faster without this instruction
#endif
  }
};
#if defined(__AVX512VNNI__)
constexpr bool HAS_COARSE = true;
#else
constexpr bool HAS_COARSE = false;
#endif

INLINE void store_weights(int16_t* p, IVec w) { store_shorts(p, w); }
INLINE void store_weights(uint8_t* p, IVec w) {
  typedef uint32_t Words __attribute__((vector_size(LANES)));
  store_bytes(p, w);
  auto words = load_bits<Words>(p);
  store_bits(p, (words & 0xff0000ffu) | (words & 0xff00u) << 8 | (words >> 8 & 0xff00u));
}

// Rounds `count` weights, a multiple of 16, of which `top` is the largest, to integers of up to `most`. None is negative.
// Returns their unit, which is NaN if top is not finite.
template <class Held>
INLINE float round_weights(const float* weights, int64_t count, float top, float most, Held* to) {
  alignas(64) static constexpr Thresholds thresholds;
  bool finite = top < __builtin_inff();
  Vec factor = splat(finite && top > 1e-30f ? most / top : 0.0f), magic = splat(12582912.0f);
  for (int64_t i = 0; i < count; i += LANES) {
    Vec units = load(weights + i) * factor;
    if (sizeof(Held) == 1) units = vmax(Vec{}, vmin(splat(most), units + load(thresholds.of_place + i)));
    store_weights(to + i, (IVec)(units + magic));  // the sum with 1.5 * 2^23 has the integer in its lower bits
  }
  return finite ? top / most : as_float(0x7fc00000);
}

// The online softmax state of up to ROWS_AT_ONCE rows.
struct State {
  const float* scales;   // [row]: of scores
  const int32_t* begin;  // [row]: added to scores of integers
  float* tops;    // [16]: maxima
  float* sums;    // [row][16]: sums of weights, lane by lane
  float* masses;  // [row][16]: sums of weights times the scales of values, if weights are rounded to integers
  float* values;  // [row][padded]: weighted values
};

template <class T, class One, int MR>
INLINE void weigh_all(const Attention& a, const typename One::Held* weights, const Span& span, const float* rescale,
                      const float* units, float* sums) {
  constexpr int NV = wide(MR) > 4 ? 4 : wide(MR);
  int64_t column = 0;
  for (; column + NV * 16 <= a.padded; column += NV * 16)
    weigh<T, One, MR, NV>(a, weights, span, column, rescale, units, sums);
  for (; column < a.padded; column += 16) weigh<T, One, MR, 1>(a, weights, span, column, rescale, units, sums);
}

template <class T, int MR>
static void step_rows(const Attention& a, const typename ScoreTerm<T>::Held* q, const Span& span, const Seen* seen,
                      const State& state) {
  alignas(64) float scores[MR * STEP_TOKENS], tops[16] = {}, rescale[16], units[MR];
  alignas(64) typename Term<T>::Held weights[MR * STEP_TOKENS];
  [[maybe_unused]] float largest_weights[MR];
  bool coarse = HAS_COARSE && IS_INTEGER<T> && !a.strict;
  constexpr int NB = wide(MR);
  int64_t part = 0;
  for (; part + NB <= span.parts; part += NB)
    score<T, MR, NB>(a, q, state.begin, span.places + part, span.coming ? span.coming + part : nullptr, scores + part * 16);
  for (; part < span.parts; part++)
    score<T, MR, 1>(a, q, state.begin, span.places + part, span.coming ? span.coming + part : nullptr, scores + part * 16);

  for (int m = 0; m < MR; m++)
    tops[m] = largest(prepare<T>(a, scores + m * STEP_TOKENS, span, state.scales[m], seen[m]));
  Vec before = load(state.tops), now = vmax(before, load(tops));
  store(rescale, power_of_two<float>(before - now));
  store(state.tops, now);
  store(tops, now);
  for (int m = 0; m < MR; m++) {
    Vec total = load(state.sums + m * 16) * rescale[m], mass{};
    UVec most{};  // as bits, infinity and NaN are the largest
    for (int64_t i = 0; i < span.parts; i++) {
      float* score = scores + m * STEP_TOKENS + i * 16;
      Vec w = power_of_two<T>(load(score) - tops[m]);
      total += w;
      if (HAS_SCALES<T>) w *= scales_of(a, a.values + span.places[i]);
      if constexpr (IS_INTEGER<T>) {
        store(score, w);
        mass += w;
        most = umax(most, (UVec)w);
      } else {
        store(weights + m * STEP_TOKENS + i * 16, w);
      }
    }
    store(state.sums + m * 16, total);
    if constexpr (IS_INTEGER<T>) {
      mass = fma(load(state.masses + m * 16), splat(rescale[m]), mass);
      store(state.masses + m * 16, mass);
      largest_weights[m] = as_float(largest_bits(most));
      if (coarse && !(largest_weights[m] * COARSE_FROM <= sum(mass))) coarse = false;
    }
  }

  auto round_all = [&](auto* to, float most) {
    for (int m = 0; m < MR; m++)
      units[m] = round_weights(scores + m * STEP_TOKENS, span.parts * 16, largest_weights[m], most, to + m * STEP_TOKENS);
  };
  if constexpr (HAS_COARSE && IS_INTEGER<T>) {
    auto bytes = (uint8_t*)weights;
    if (coarse) {
      round_all(bytes, LARGEST_BYTE);
      return weigh_all<T, CoarseTerm, MR>(a, bytes, span, rescale, units, state.values);
    }
  }
  if constexpr (IS_INTEGER<T>) round_all(weights, LARGEST_SHORT);
  weigh_all<T, Term<T>, MR>(a, weights, span, rescale, units, state.values);
}

template <class T>
INLINE void step_some_rows(const Attention& a, int64_t rows, const typename ScoreTerm<T>::Held* q, const Span& span,
                           const Seen* seen, const State& state) {
  switch (rows) {
#define ROWS(count) \
  case count: \
    return step_rows<T, min(count, ROWS_AT_ONCE)>(a, q, span, seen, state);
    ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8)
#undef ROWS
  }
}

}  // namespace quire::ISA
