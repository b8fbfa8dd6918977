// Rows of logits, read in groups of 64 tokens. One pass finds the maxima of the groups. Later passes read only groups
// whose maximum is large enough, usually few. The vocabulary is never sorted.
#pragma once
#include "simd.h"

namespace quire::ISA {

constexpr int64_t GROUP = 64;
constexpr float INF = __builtin_inff();

template <class T>
struct Row {
  const T* x;
  int64_t size;

  int64_t num_groups() const { return (size + GROUP - 1) / GROUP; }
  // The logits of a group, in place or copied to `buffer`; -inf after the end of the row.
  const float* group(int64_t g, float* buffer) const {
    const T* begin = x + g * GROUP;
    int64_t count = min(GROUP, size - g * GROUP);
    if (sizeof(T) == sizeof(float) && count == GROUP) return (const float*)begin;
    if (count == GROUP) {
      for (int64_t i = 0; i < GROUP; i += LANES) store(buffer + i, load(begin + i));
      return buffer;
    }
    for (int64_t i = 0; i < GROUP; i++) buffer[i] = i < count ? to_float(begin[i]) : -INF;
    return buffer;
  }
};

// Number of floats for the maxima of `size` logits, padded to whole vectors.
INLINE int64_t maxima_size(int64_t size) { return up_to((size + GROUP - 1) / GROUP, LANES); }

INLINE bool any(IVec mask) { return bits_of(mask) != 0; }

// A lane stays 0 while no x is +inf or NaN, and becomes NaN otherwise.
INLINE Vec check(Vec sofar, Vec x) { return fma(vmax(splat(-3.0e38f), x), Vec{}, sofar); }
INLINE bool passed(Vec checks) { return sum(checks) == 0; }

// The largest logit, or NaN if a logit is NaN or +inf. Writes the groups' maxima, padded by -inf to whole vectors.
template <class T>
static float find_maxima(const Row<T>& row, float* maxima) {
  alignas(64) float buffer[GROUP];
  Vec best = splat(-INF), checks{};
  int64_t num_groups = row.num_groups();
  for (int64_t g = 0; g < num_groups; g++) {
    const float* x = row.group(g, buffer);
    Vec a = load(x), b = load(x + 16), c = load(x + 32), d = load(x + 48);
    checks = check(check(check(check(checks, a), b), c), d);
    Vec most = vmax(vmax(a, b), vmax(c, d));
    maxima[g] = largest(most);
    best = vmax(best, most);
  }
  for (int64_t g = num_groups; g < up_to(num_groups, LANES); g++) maxima[g] = -INF;
  return passed(checks) ? largest(best) : __builtin_nanf("");
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// For each set of 8 lanes, the indices of its lanes, one byte each.
struct Orders {
  uint64_t of[256];
  constexpr Orders() : of() {
    for (int set = 0; set < 256; set++)
      for (int lane = 0, count = 0; lane < 8; lane++)
        if (set >> lane & 1) of[set] |= (uint64_t)lane << 8 * count++;
  }
};
static constexpr Orders kOrders;
INLINE __m256 compressed(__m256 v, uint32_t set) {
  return _mm256_permutevar8x32_ps(v, _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)kOrders.of[set])));
}
#endif

// Writes the lanes of v where mask is set contiguously, and up to 16 more floats. Returns the number of lanes set.
INLINE int64_t compress(float* target, Vec v, IVec mask) {
  uint32_t kept = bits_of(mask);
#if defined(__AVX512F__)
  store(target, (Vec)_mm512_maskz_compress_ps((__mmask16)kept, (__m512)v));
#elif defined(__AVX2__)
  if (kept == 0) return 0;
  _mm256_storeu_ps(target, compressed((__m256)v.low, kept & 255));
  _mm256_storeu_ps(target + __builtin_popcount(kept & 255), compressed((__m256)v.high, kept >> 8));
#else
  if (kept == 0) return 0;
  float x[LANES];
  store(x, v);
  for (int i = 0, count = 0; i < LANES; i++) {
    target[count] = x[i];
    count += kept >> i & 1;
  }
#endif
  return __builtin_popcount(kept);
}

// Writes every score(logit) that is at least `least`, in the order of tokens, and returns their number. score must be
// non-decreasing. `out` needs space for all groups and one more vector.
template <class T, class Score>
static int64_t gather(const Row<T>& row, const float* maxima, const Score& score, float least, float* out) {
  alignas(64) float buffer[GROUP];
  int64_t count = 0;
  for (int64_t g = 0; g < row.num_groups(); g++) {
    if (score(maxima[g]) < least) continue;
    const float* x = row.group(g, buffer);
    for (int64_t i = 0; i < GROUP; i += LANES) {
      Vec scores = score(load(x + i));
      count += compress(out + count, scores, scores >= least);
    }
  }
  return count;
}

// ---- selection ----

// e^x for x in [-700, 0], within 1e-14 of its value.
INLINE DVec exp(DVec x) {
  const double magic = 6755399441055744.0;  // 1.5 * 2^52: the sum is rounded to an integer
  DVec shifted = x * 1.4426950408889634 + magic, n = shifted - magic;
  DVec r = x - n * 0.693147180369123816490;
  r -= n * 1.90821492927058770002e-10;
  DVec p = DVec{} + 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  return (DVec)((LVec)p + ((LVec)shifted << 52));
}

INLINE double sum(DVec v) {
  double x[8];
  store_bits(x, v);
  return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

INLINE IVec first_lanes(int64_t count) { return count >= LANES ? splat_int(-1) : lane_numbers() < (int32_t)count; }

INLINE int64_t count_of(IVec mask) { return __builtin_popcount(bits_of(mask)); }

// Writes e^score of each score, none below -700, to `masses`, padded to whole vectors. Returns their sum.
static double weigh(const float* scores, int64_t count, double* masses) {
  DVec total{};
  for (int64_t i = 0; i < count; i += LANES) {
    Vec some = select(first_lanes(count - i), load(scores + i), splat(-700.0f));
    DVec halves[2];
    to_doubles(some, &halves[0], &halves[1]);
    for (int h = 0; h < 2; h++) {
      DVec mass = exp(halves[h]);
      store_bits(masses + i + 8 * h, mass);
      total += mass;
    }
  }
  return sum(total);
}

INLINE DVec add_where(DVec total, const double* masses, IVec mask) {
#if defined(__AVX512F__)
  __mmask16 lanes = _mm512_movepi32_mask((__m512i)mask);
  total = (DVec)_mm512_mask_add_pd((__m512d)total, (__mmask8)lanes, (__m512d)total, _mm512_loadu_pd(masses));
  return (DVec)_mm512_mask_add_pd((__m512d)total, (__mmask8)(lanes >> 8), (__m512d)total, _mm512_loadu_pd(masses + 8));
#else
  alignas(64) int32_t lanes[LANES];
  alignas(64) int64_t wide[LANES];
  store_bits(lanes, mask);
  for (int i = 0; i < LANES; i++) wide[i] = lanes[i];
  for (int i = 0; i < LANES; i += 8) total += (DVec)(load_bits<LVec>(masses + i) & load_bits<LVec>(wide + i));
  return total;
#endif
}

INLINE void compress(double* target, const double* masses, IVec mask) {
  uint32_t kept = bits_of(mask);
#if defined(__AVX512F__)
  __m512d low = _mm512_loadu_pd(masses), high = _mm512_loadu_pd(masses + 8);
  _mm512_storeu_pd(target, _mm512_maskz_compress_pd((__mmask8)kept, low));
  _mm512_storeu_pd(target + __builtin_popcount(kept & 255), _mm512_maskz_compress_pd((__mmask8)(kept >> 8), high));
#elif defined(__AVX2__)
  static const uint8_t twice[16] = {0x00, 0x03, 0x0c, 0x0f, 0x30, 0x33, 0x3c, 0x3f,
                                    0xc0, 0xc3, 0xcc, 0xcf, 0xf0, 0xf3, 0xfc, 0xff};  // each double is two floats
  for (; kept; kept >>= 4, masses += 4) {
    _mm256_storeu_ps((float*)target, compressed(_mm256_loadu_ps((const float*)masses), twice[kept & 15]));
    target += __builtin_popcount(kept & 15);
  }
#else
  for (; kept; kept >>= 1, masses++) {
    *target = *masses;
    target += kept & 1;
  }
#endif
}

// The median of up to nine evenly spaced scores.
static float pivot_of(const float* scores, int64_t count) {
  float some[9];
  int size = (int)min(count, 9);
  for (int i = 0; i < size; i++) {
    float one = scores[(2 * i + 1) * count / (2 * size)];
    int at = i;
    for (; at > 0 && some[at - 1] < one; at--) some[at] = some[at - 1];
    some[at] = one;
  }
  return some[size / 2];
}

struct Border {
  float score;   // the lowest score such that the weight of all larger scores is below the limit
  double above;  // that weight
};

// Quickselect by weight: scores on the wrong side of a pivot are dropped. The weight of a score is its mass, or 1 if
// masses is null. Overwrites both arrays, and reads and writes up to one vector after their end. The limit must be
// above 0. pivot: the first pivot, a guess.
static Border find_border(float* scores, double* masses, int64_t count, double limit, float pivot) {
  Border border{INF, 0};
  double dropped = 0;  // weight of the dropped scores that are above the border
  while (count > 0) {
    DVec larger_mass{}, equal_mass{};
    int64_t larger_count = 0, equal_count = 0;
    for (int64_t i = 0; i < count; i += LANES) {
      Vec some = load(scores + i);
      IVec valid = first_lanes(count - i);
      IVec larger = (some > pivot) & valid, equal = (some >= pivot) & valid & ~larger;
      if (masses) {
        larger_mass = add_where(larger_mass, masses + i, larger);
        equal_mass = add_where(equal_mass, masses + i, equal);
      } else {
        larger_count += count_of(larger);
        equal_count += count_of(equal);
      }
    }
    double weight = dropped + (masses ? sum(larger_mass) : (double)larger_count);
    double equals = masses ? sum(equal_mass) : (double)equal_count;
    bool lower = weight < limit;
    if (lower) {
      border = {pivot, weight};
      dropped = weight + equals;
    }
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i += LANES) {
      Vec some = load(scores + i);
      IVec wanted = lower ? some < pivot : some > pivot;
      wanted &= first_lanes(count - i);
      if (masses) compress(masses + kept, masses + i, wanted);
      kept += compress(scores + kept, some, wanted);
    }
    count = kept;
    if (count) pivot = pivot_of(scores, count);
  }
  return border;
}

// The k-th largest of `count` maxima: at least k logits are not below it. -inf if count is below k.
static float least_of_largest(const float* maxima, int64_t count, int64_t k, float* memory) {
  if (k > count) return -INF;
  memcpy(memory, maxima, count * sizeof(float));
  return find_border(memory, nullptr, count, (double)k, pivot_of(memory, count)).score;
}

}  // namespace quire::ISA
