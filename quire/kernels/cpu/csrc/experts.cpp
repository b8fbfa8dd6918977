// Experts: for each token the weighted sum of a few MLPs, with a gate or without one, whose weights are one of a stack.
//
// Pairs of a token and one of its experts are sorted by expert. Their rows of x are gathered, so that the rows of an expert
// are one product. Threads divide the columns of each product. The results of a token are added in the order of experts.
#include <cmath>

#include "products.h"

namespace quire::ISA {

// How experts are selected: see Routing in the contract.
struct Router {
  int64_t experts, k, groups, top_groups;
  bool normalise, has_sigmoids, is_mixer;
  float scale, jitter;
  const float *bias, *scales;  // of experts, or null
};

// Scores of all experts: sigmoids, or the exponentials of a softmax, whose sum is returned. NaN stays NaN.
static float score(const Router& r, const float* logits, float* scores) {
  Vec most = splat(-INFINITY), total{};
  for (int64_t i = 0; i < r.experts; i++) most = vmax(splat(logits[i]), most);
  for (int64_t i = 0; i < r.experts; i++) {
    alignas(64) float all[LANES];
    Vec x = splat(logits[i]);
    Vec e = logits[i] != logits[i] ? x : r.has_sigmoids ? sigmoid(x) : exp(x - most);
    store(all, e);
    scores[i] = all[0];
    total += e;
  }
  alignas(64) float sums[LANES];
  store(sums, total);
  return r.has_sigmoids ? 1.0f : sums[0];
}

// Replaces the values of experts outside of the best groups by -infinity. sums: room for a number of each group.
static void keep_top_groups(const Router& r, float* values, float* sums) {
  int64_t size = r.experts / r.groups;
  for (int64_t g = 0; g < r.groups; g++) {
    float best = -INFINITY, second = -INFINITY;
    for (int64_t i = g * size; i < (g + 1) * size; i++) {
      second = values[i] > best ? best : values[i] > second ? values[i] : second;
      best = values[i] > best ? values[i] : best;
    }
    sums[g] = best + second;
  }
  for (int64_t g = 0; g < r.groups; g++) {
    int64_t before = 0;  // groups that are selected before this one
    for (int64_t other = 0; other < r.groups; other++)
      before += sums[other] > sums[g] || (sums[other] == sums[g] && other < g);
    if (before < r.top_groups) continue;
    for (int64_t i = g * size; i < (g + 1) * size; i++) values[i] = -INFINITY;
  }
}

// The weights of a sparse mixer: shares in softmaxes over the experts that are not selected before and have near logits.
static void mix_token(const Router& r, const float* logits, const int64_t* ids, float* weights) {
  for (int64_t j = 0; j < r.k; j++) {
    float most = logits[ids[j]], sum = 0;
    for (int64_t i = 0; i < r.experts; i++) {
      bool taken = false;
      for (int64_t other = 0; other < j; other++) taken = taken || ids[other] == i;
      float size = fabsf(logits[i]) > most ? fabsf(logits[i]) : most;
      if (taken || (most - logits[i]) / size > 2 * r.jitter) continue;
      alignas(64) float all[LANES];
      store(all, exp(splat(logits[i] - most)));
      sum += all[0];
    }
    weights[j] = 1 / sum;
  }
}

// The k experts of a token, those with the largest values first, and their weights. NaN counts as the smallest logit, and
// makes all weights of a softmax NaN. values, scores: room for a number of each expert, sums: of each group.
template <class T>
static void route_token(const Router& r, const T* logits, float* values, float* scores, float* sums, int64_t* ids,
                        float* weights) {
  for (int64_t i = 0; i < r.experts; i++) values[i] = to_float(logits[i]);
  float sum = score(r, values, scores), chosen = 0;
  if (r.bias)
    for (int64_t i = 0; i < r.experts; i++) values[i] = scores[i] / sum + r.bias[i];
  else if (r.has_sigmoids || r.groups > 1)  // without either, scores are in the order of logits
    for (int64_t i = 0; i < r.experts; i++) values[i] = scores[i] / sum;
  if (r.groups > 1) keep_top_groups(r, values, sums);
  for (int64_t j = 0; j < r.k; j++) {
    int64_t best = -1;
    for (int64_t i = 0; i < r.experts; i++) {
      bool taken = false;
      for (int64_t other = 0; other < j; other++) taken = taken || ids[other] == i;
      if (!taken && (best < 0 || values[i] > values[best])) best = i;
    }
    ids[j] = best;
  }
  if (r.is_mixer) return mix_token(r, values, ids, weights);
  for (int64_t j = 0; j < r.k; j++) chosen += scores[ids[j]] / sum;
  float divisor = r.normalise ? chosen + 1e-20f : 1.0f;  // the scores of sigmoids may all be 0
  for (int64_t j = 0; j < r.k; j++)
    weights[j] = scores[ids[j]] / sum / divisor * r.scale * (r.scales ? r.scales[ids[j]] : 1.0f);
}

// logits (tokens, experts), ids int64 (tokens, k), bias and scales float32 (experts,) or None, weights float32 (tokens, k),
// dtype, tokens, experts, k, elements from row to row of the logits, whether the weights of a token are divided by their sum,
// kind of scores (0: softmax, 1: sigmoids, 2: a sparse mixer), groups, top groups, factor of the weights, jitter
void route(const Arg* a, const Team& team) {
  Router r = {a[7].integer, a[8].integer, a[12].integer, a[13].integer, a[10].integer != 0, a[11].integer == 1, a[11].integer == 2,
              (float)a[14].number, (float)a[15].number, (const float*)a[2].data, (const float*)a[3].data};
  int64_t tokens = a[6].integer, stride = a[9].integer, begin, end;
  auto values = (float*)team.scratch((2 * r.experts + r.groups) * sizeof(float));
  team.share(tokens, 1, &begin, &end);
  for (int64_t i = begin; i < end; i++) {
    auto ids = (int64_t*)a[1].data + i * r.k;
    auto weights = (float*)a[4].data + i * r.k;
    float *scores = values + r.experts, *sums = scores + r.experts;
    if (a[5].integer)
      route_token(r, (const bf16*)a[0].data + i * stride, values, scores, sums, ids, weights);
    else
      route_token(r, (const float*)a[0].data + i * stride, values, scores, sums, ids, weights);
  }
}

// One stack of weights.
struct Stack {
  const char *data, *scales, *offsets;        // scales and offsets: of codes, or null
  int64_t bytes, scale_bytes;                 // of one weight
  const Arg* format;                          // the numbers of `format_of`, with bits 0 for bf16 and float32

  // Terms of a product over `size` columns: bf16 is read in pairs, and packed weights have zeros behind their columns.
  int64_t terms(int64_t size, bool is_bf16) const { return is_bf16 && format[0].integer == 0 ? up_to(size, 2) : size; }
};

static void multiply_expert(const Stack& stack, int64_t expert, Product p, bool is_bf16, bool tiles, const Team& team) {
  p.weight = stack.data + expert * stack.bytes;
  if (stack.format[0].integer == 0) return multiply(p, is_bf16, tiles, team);
  CodeProduct q;
  (Product&)q = p;
  q.scales = stack.scales + expert * stack.scale_bytes;
  q.offsets = stack.offsets ? stack.offsets + expert * stack.scale_bytes : nullptr;
  q.format = format_of(stack.format, p.k);
  q.is_bf16 = is_bf16;
  multiply_codes(q, team);
}

// Sorts pairs by expert, in the order of tokens within one: pairs of expert e are order[starts[e]] to order[starts[e + 1]].
static void sort_pairs(const int64_t* ids, int64_t pairs, int64_t experts, int64_t* order, int64_t* starts) {
  memset(starts, 0, (experts + 1) * sizeof(int64_t));
  for (int64_t i = 0; i < pairs; i++) starts[ids[i] + 1]++;
  for (int64_t e = 0; e < experts; e++) starts[e + 1] += starts[e];
  for (int64_t i = 0; i < pairs; i++) order[starts[ids[i]]++] = i;
  for (int64_t e = experts; e > 0; e--) starts[e] = starts[e - 1];
  starts[0] = 0;
}

template <class T>
static void activate_rows(Activation kind, T* rows, int64_t stride, int64_t size, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++)
    for (int64_t i = 0; i < size; i += LANES) {
      T* some = rows + row * stride + i;
      store_some(some, activate(kind, load_some(some, size - i)), size - i);
    }
}

// Adds the results of each token. places: of pairs in the sorted order.
template <class T>
static void combine(const float* weights, const int64_t* ids, const int64_t* places, const T* results, T* out,
                    int64_t tokens, int64_t each, int64_t size, const Team& team) {
  int64_t begin, end;
  team.share(tokens, 1, &begin, &end);
  for (int64_t token = begin; token < end; token++)
    for (int64_t column = 0; column < size; column += LANES) {
      Vec sum{};
      for (int64_t last = -1, done = 0; done < each; done++) {
        int64_t next = -1;
        for (int64_t i = token * each; i < (token + 1) * each; i++)
          if (ids[i] > last && (next < 0 || ids[i] < ids[next])) next = i;
        last = ids[next];
        sum += load_some(results + places[next] * size + column, size - column) * splat(weights[next]);
      }
      store_some(out + token * size + column, sum, size - column);
    }
}

// x (tokens, size), ids int64 and weights float32 (tokens, each), the up stack: data, scales or null, offsets or null, the
// down stack alike, out (tokens, size), memory: gathered (pairs, size), inner (pairs, inner size), results (pairs, size),
// int64 (2 * pairs + experts + 1,), rows of gathered and inner padded to even sizes; dtype, tokens, each, experts, size, inner
// size, activation, whether experts have gates, whether tile registers may be used, of each stack: bytes of a weight, of its
// scales, the numbers of `format_of` with bits 0 for bf16 and float32
void experts(const Arg* a, const Team& team) {
  auto ids = (const int64_t*)a[1].data;
  const Arg* n = a + 14;
  bool is_bf16 = n[0].integer, gated = n[7].integer, tiles = n[8].integer;
  int64_t tokens = n[1].integer, each = n[2].integer, experts = n[3].integer, size = n[4].integer, inner = n[5].integer;
  int64_t pairs = tokens * each, element = is_bf16 ? sizeof(bf16) : sizeof(float), begin, end;
  Stack up = {(const char*)a[3].data, (const char*)a[4].data, (const char*)a[5].data, n[9].integer, n[10].integer, n + 11};
  const Arg* m = n + 11 + FORMAT_NUMBERS;
  Stack down = {(const char*)a[6].data, (const char*)a[7].data, (const char*)a[8].data, m[0].integer, m[1].integer, m + 2};
  char *gathered = (char*)a[10].data, *middle = (char*)a[11].data, *results = (char*)a[12].data;
  auto order = (int64_t*)a[13].data, places = order + pairs, starts = places + pairs;
  if (team.rank == 0) {
    sort_pairs(ids, pairs, experts, order, starts);
    for (int64_t i = 0; i < pairs; i++) places[order[i]] = i;
  }
  team.barrier();
  team.share(pairs, 1, &begin, &end);
  int64_t wide = up_to(size, 2) * element, inner_wide = up_to(inner, 2) * element;  // bytes of a row
  for (int64_t i = begin; i < end; i++) {
    memset(gathered + (i + 1) * wide - element, 0, element);
    memset(middle + (i + 1) * inner_wide - element, 0, element);
    memcpy(gathered + i * wide, (const char*)a[0].data + order[i] / each * size * element, size * element);
  }
  team.barrier();
  for (int half = 0; half < 2; half++) {
    for (int64_t e = 0; e < experts; e++) {
      int64_t first = starts[e], count = starts[e + 1] - first;
      if (count == 0) continue;
      Product p{};
      p.x = half ? middle + first * inner_wide : gathered + first * wide;
      p.out = half ? results + first * size * element : middle + first * inner_wide;
      p.rows = count;
      p.n = half ? size : inner;
      p.k = half ? down.terms(inner, is_bf16) : up.terms(size, is_bf16);
      p.x_stride = (half ? inner_wide : wide) / element;
      p.out_stride = half ? size : inner_wide / element;
      p.gate = half || !gated ? -1 : n[6].integer;
      multiply_expert(half ? down : up, e, p, is_bf16, tiles, team);
    }
    team.barrier();
    if (half || gated) continue;
    if (is_bf16)
      activate_rows((Activation)n[6].integer, (bf16*)middle, inner_wide / element, inner, begin, end);
    else
      activate_rows((Activation)n[6].integer, (float*)middle, inner_wide / element, inner, begin, end);
    team.barrier();
  }
  auto weights = (const float*)a[2].data;
  if (is_bf16)
    combine(weights, ids, places, (const bf16*)results, (bf16*)a[9].data, tokens, each, size, team);
  else
    combine(weights, ids, places, (const float*)results, (float*)a[9].data, tokens, each, size, team);
}

}  // namespace quire::ISA
