// Logprobs: quire.kernels.reference.likelihood specifies them.
#include "logit_rows.h"
#include "team.h"

namespace quire::ISA {

// The log probability of a logit, in two steps that are rounded like those of the reference.
struct LogShare {
  float top, log_total;
  Vec operator()(Vec x) const { return (x - top) - log_total; }
  float operator()(float x) const { return (x - top) - log_total; }
};

template <class T>
static double total_of(const Row<T>& row, float top, const float* maxima) {
  alignas(64) float buffer[GROUP];
  double total = 0;
  for (int64_t first = 0; first < row.num_groups(); first += LANES) {
    Vec some{};
    for (int64_t g = first; g < min(first + LANES, row.num_groups()); g++) {
      if (maxima[g] - top < -80.0f) continue;  // negligible relative to the largest
      const float* x = row.group(g, buffer);
      for (int64_t i = 0; i < GROUP; i += LANES) some += exp(load(x + i) - top);
    }
    total += (double)sum(some);
  }
  return total;
}

template <class T>
static int64_t rank_of(const Row<T>& row, const LogShare& share, float own, const float* maxima) {
  alignas(64) float buffer[GROUP];
  IVec larger = splat_int(0);
  for (int64_t g = 0; g < row.num_groups(); g++) {
    if (!(share(maxima[g]) > own)) continue;
    const float* x = row.group(g, buffer);
    for (int64_t i = 0; i < GROUP; i += LANES) larger -= share(load(x + i)) > own;
  }
  int64_t rank = 1;
  for (int i = 0; i < LANES; i++) rank += larger[i];
  return rank;
}

// ---- the most likely ----

// Keys descend with the values; for equal values they descend as ids ascend.
INLINE uint64_t key_of(float value, int64_t id) {
  uint32_t bits = as_bits(value + 0.0f);  // turns -0.0 into 0.0, which it is equal to
  bits = bits >> 31 ? ~bits : bits | 0x80000000u;
  return (uint64_t)bits << 32 | (0xffffffffu - (uint32_t)id);
}

static void sink(uint64_t* heap, int64_t at, int64_t size) {
  uint64_t key = heap[at];
  for (int64_t child; (child = 2 * at + 1) < size; at = child) {
    if (child + 1 < size && heap[child + 1] < heap[child]) child++;
    if (heap[child] >= key) break;
    heap[at] = heap[child];
  }
  heap[at] = key;
}

static void sort_falling(uint64_t* keys, int64_t count) {  // heapsort in descending order
  for (int64_t i = count / 2; i-- > 0;) sink(keys, i, count);
  for (int64_t last = count; --last > 0;) {
    uint64_t least = keys[0];
    keys[0] = keys[last];
    keys[last] = least;
    sink(keys, 0, last);
  }
}

// Keys of the k most likely tokens, in any order.
template <class T>
static void collect(const Row<T>& row, const LogShare& share, const float* maxima, int64_t k, float* memory,
                    uint64_t* keys) {
  float least = share(least_of_largest(maxima, row.num_groups(), k, memory));
  int64_t count = gather(row, maxima, share, least, memory);
  Border border = find_border(memory, nullptr, count, (double)k, least);
  int64_t equals = k - (int64_t)border.above, found = 0;  // equals: how many tokens with the border's score to keep
  alignas(64) float buffer[GROUP];
  for (int64_t g = 0; g < row.num_groups() && found < k; g++) {
    if (share(maxima[g]) < border.score) continue;
    const float* x = row.group(g, buffer);
    for (int64_t i = 0; i < min(GROUP, row.size - g * GROUP); i++) {
      float value = share(x[i]);
      if (value > border.score || (value == border.score && equals-- > 0)) keys[found++] = key_of(value, g * GROUP + i);
    }
  }
}

struct Report {
  int64_t n, k;
  const int64_t* tokens;
  float* values;
  int32_t* rank;
  int32_t* top_ids;
  float* top_values;
};

// A row with NaN or +inf, or of -inf only: all values are NaN and count as equal.
static void report_nothing(const Report& r) {
  for (int64_t i = 0; i < r.n; i++) r.values[i] = __builtin_nanf("");
  *r.rank = 1;
  for (int64_t i = 0; i < r.k; i++) {
    r.top_ids[i] = (int32_t)i;
    r.top_values[i] = __builtin_nanf("");
  }
}

template <class T>
static void report(const Row<T>& row, const Report& r, float* maxima, float* memory, uint64_t* keys) {
  float top = find_maxima(row, maxima);
  if (!(top > -INF)) return report_nothing(r);
  LogShare share{top, (float)__builtin_log(total_of(row, top, maxima))};
  for (int64_t i = 0; i < r.n; i++) r.values[i] = share(to_float(row.x[r.tokens[i]]));
  *r.rank = (int32_t)rank_of(row, share, r.values[0], maxima);
  if (r.k == 0) return;
  collect(row, share, maxima, r.k, memory, keys);
  sort_falling(keys, r.k);
  for (int64_t i = 0; i < r.k; i++) {
    int64_t id = 0xffffffffu - (uint32_t)keys[i];
    r.top_ids[i] = (int32_t)id;
    r.top_values[i] = share(to_float(row.x[id]));
  }
}

template <class T>
static void report_rows(const Arg* a, const Team& team) {
  int64_t num_rows = a[7].integer, vocab_size = a[8].integer, stride = a[9].integer;
  int64_t n = a[10].integer, k = a[11].integer;
  int64_t maxima = maxima_size(vocab_size), scores = up_to(vocab_size, GROUP) + LANES;
  auto keys = (uint64_t*)team.scratch(k * sizeof(uint64_t) + (maxima + scores) * sizeof(float));
  auto floats = (float*)(keys + k);
  for (int64_t i; (i = team.take()) < num_rows;) {
    Report r{n,
             k,
             (const int64_t*)a[1].data + i * n,
             (float*)a[2].data + i * n,
             (int32_t*)a[3].data + i,
             (int32_t*)a[4].data + i * k,
             (float*)a[5].data + i * k};
    report(Row<T>{(const T*)a[0].data + i * stride, vocab_size}, r, floats, floats + maxima, keys);
  }
}

// logits (num_rows, vocab_size), tokens (num_rows, n) int64, their values float32, ranks (num_rows,) int32 of the
// first of them, ids (num_rows, k) int32 of the most likely, their values float32, dtype (0 float32, 1 bf16),
// num_rows, vocab_size, stride of rows, n, k
void logprobs(const Arg* a, const Team& team) {
  if (a[6].integer)
    report_rows<bf16>(a, team);
  else
    report_rows<float>(a, team);
}

}  // namespace quire::ISA
