// Sampling: quire.kernels.reference.sampling specifies the operations and their order.
//
// One thread handles one row. The filters are reduced to one threshold score, which is selected among the few groups of
// tokens that can contain it. The token is the arg max of score plus noise. The two logarithms of the noise are skipped
// if the random word is too small to win, and the random word is skipped if no noise could win. Skipped tokens cannot
// be the arg max, so the result is exact.
#include "noise.h"
#include "logit_rows.h"
#include "team.h"

namespace quire::ISA {

// Sampling metadata of one row, packed by the Python wrapper. begin, end: the row's range in edits and history.
struct Wish {
  uint64_t seed;
  int64_t edits_begin, edits_end, history_begin, history_end;
  int32_t sample_index, position, top_k;
  int32_t mask;  // index in the masks, or -1
  float temperature, top_p;
  float min_score;  // the logarithm of min_p
  float presence, frequency, repetition;
};
static_assert(sizeof(Wish) == 80, "the wrapper packs it so");

struct Sampling {
  const char* logits;
  const Wish* wishes;
  int64_t* tokens;
  int64_t is_bf16, num_rows, vocab_size, stride;  // elements from row to row
  const uint32_t* masks;
  const int64_t* edit_tokens;
  const float* edit_values;
  const int64_t* history_tokens;
  const uint8_t* are_output;
};

// Scratch of a thread.
struct Memory {
  float* maxima;
  float* scores;  // scores of candidates; during edits, int32 counts of tokens
  double* masses;  // of candidates
  float* edited;
};

// ---- edits ----

// Copies the row, with -inf where the mask has no bit. Returns whether the row has no NaN and no +inf.
template <class T>
static bool copy(const Row<T>& row, const uint32_t* mask, float* out) {
  const IVec bit = splat_int(1) << lane_numbers();
  alignas(64) float buffer[GROUP];
  Vec checks{};
  for (int64_t g = 0; g < row.num_groups(); g++) {
    const float* x = row.group(g, buffer);
    for (int64_t i = 0; i < GROUP && g * GROUP + i < row.size; i += LANES) {
      int64_t token = g * GROUP + i;
      Vec v = load(x + i);
      checks = check(checks, v);
      if (mask) {
        uint32_t bits = mask[token / 32] >> token % 32;
        v = select((splat_int((int32_t)bits) & bit) == bit, v, splat(-INF));
      }
      store_some(out + token, v, row.size - token);
    }
  }
  return passed(checks);
}

// Products are rounded separately, as in the reference. In double they are exact, so a fused multiply-add of the
// compiler cannot change the result.
INLINE float product(float a, float b) { return (float)((double)a * b); }

static void penalise(const Sampling& s, const Wish& wish, int32_t* counts, float* x) {
  const float largest_float = 3.40282347e38f;
  const int64_t* tokens = s.history_tokens;
  for (int64_t i = wish.history_begin; i < wish.history_end; i++) counts[tokens[i]] = 0;
  for (int64_t i = wish.history_begin; i < wish.history_end; i++) counts[tokens[i]] += s.are_output[i] != 0;
  for (int64_t i = wish.history_begin; i < wish.history_end; i++) {
    int32_t& count = counts[tokens[i]];
    if (count < 0) continue;  // already penalised
    float value = x[tokens[i]];
    value = value > 0 ? value / wish.repetition : product(value, wish.repetition);
    value = value - product(wish.frequency, (float)count) - (count > 0 ? wish.presence : 0.0f);
    x[tokens[i]] = value > largest_float ? largest_float : value;
    count = -1;
  }
}

// Writes the row after masks, edits and penalties to memory.edited. Returns false if the row has NaN or +inf.
template <class T>
static bool edit(const Sampling& s, const Wish& wish, const Row<T>& row, const Memory& memory) {
  int64_t words = (s.vocab_size + 31) / 32;
  if (!copy(row, wish.mask < 0 ? nullptr : s.masks + wish.mask * words, memory.edited)) return false;
  for (int64_t i = wish.edits_begin; i < wish.edits_end; i++) memory.edited[s.edit_tokens[i]] += s.edit_values[i];
  penalise(s, wish, (int32_t*)memory.scores, memory.edited);
  return true;
}

// ---- filters ----

struct Scale {
  float top, temperature;
  Vec operator()(Vec x) const { return (x - top) / temperature; }
  float operator()(float x) const { return (x - top) / temperature; }
};

// Scores below this have a part of the probability mass that is too small to affect a float32 top_p below 1.
constexpr float NEGLIGIBLE = -45;

// The lowest score that the filter keeps, of those that are at least `least`.
template <class T>
static float top_k_border(const Row<T>& row, const Scale& scale, float least, int64_t k, const Memory& memory) {
  float proven = scale(least_of_largest(memory.maxima, row.num_groups(), k, memory.scores));
  least = maxf(least, proven);
  int64_t count = gather(row, memory.maxima, scale, least, memory.scores);
  return count > k ? find_border(memory.scores, nullptr, count, (double)k, least).score : least;
}

template <class T>
static float top_p_border(const Row<T>& row, const Scale& scale, float least, float top_p, const Memory& memory) {
  int64_t count = gather(row, memory.maxima, scale, maxf(least, NEGLIGIBLE), memory.scores);
  double limit = top_p * weigh(memory.scores, count, memory.masses);
  float border = find_border(memory.scores, memory.masses, count, limit, -4.0f).score;
  return border < 0 ? border : 0;  // the most likely token is always kept
}

// ---- choice ----

struct Best {
  float value;
  int64_t token;
};

// Updates `best` with the tokens of a group whose score is at least `least`.
static void compete(const float* x, const uint32_t* words, const Scale& scale, float least, int64_t first, Best* best) {
  alignas(64) float values[GROUP];
  Vec most = splat(-INF);
  for (int64_t i = 0; i < GROUP; i += LANES) {
    Vec scores = scale(load(x + i));
    Vec v = select(scores >= least, scores + gumbel(load_bits<UVec>(words + i)), splat(-INF));
    store(values + i, v);
    most = vmax(most, v);
  }
  if (largest(most) < best->value) return;
  for (int64_t i = 0; i < GROUP; i++)
    if (values[i] > best->value || (values[i] == best->value && first + i < best->token))
      *best = {values[i], first + i};
}

// Whether any random word of the group is at least `least`. If so, writes all words in the order of tokens.
INLINE bool draw_words(const Philox& philox, int64_t g, uint32_t least, uint32_t* out) {
  Words low = Philox::of(philox, g * (GROUP / 4)), high = Philox::of(philox, g * (GROUP / 4) + 8);
  IVec reached = splat_int(0);
  for (int j = 0; j < 4; j++) {
    UVec both = (UVec)((low.words[j] & 0xffffffffu) | (high.words[j] << 32));
    reached |= both >= least;
  }
  if (!any(reached)) return false;
  for (int j = 0; j < 4; j++) {
    alignas(64) uint64_t lanes[2][8];
    store_bits(lanes[0], low.words[j]);
    store_bits(lanes[1], high.words[j]);
    for (int i = 0; i < 8; i++) {
      out[i * 4 + j] = (uint32_t)lanes[0][i];
      out[32 + i * 4 + j] = (uint32_t)lanes[1][i];
    }
  }
  return true;
}

// The smallest random word with which a token can win. share_needed: e^lead, where lead is the score of the token
// before noise minus the best value so far. Noise is at most -log(1 - u); the margin exceeds all rounding by far.
INLINE uint32_t least_word(float share_needed) {
  float distance = share_needed * 4299262263.0f + 4.0f;
  return distance >= 4294967040.0f ? 0 : 0xffffffffu - (uint32_t)distance;
}

template <class T>
static int64_t draw(const Row<T>& row, const Wish& wish, const Scale& scale, float least, const float* maxima) {
  uint32_t position = (uint32_t)wish.position, sample_index = (uint32_t)wish.sample_index;
  Philox philox{position, sample_index, {(uint32_t)wish.seed, (uint32_t)(wish.seed >> 32)}};
  alignas(64) float buffer[GROUP];
  alignas(64) uint32_t words[GROUP];
  alignas(64) float tops[LANES], leads[LANES], shares[LANES];
  int64_t peak = 0;
  while (maxima[peak] != scale.top) peak++;
  draw_words(philox, peak, 0, words);
  Best best{-INF, 0};
  compete(row.group(peak, buffer), words, scale, least, peak * GROUP, &best);  // a good first value to compare with
  for (int64_t first = 0; first < row.num_groups(); first += LANES) {
    Vec scores = scale(load(maxima + first)), lead = scores - best.value;
    store(tops, scores);
    store(leads, lead);
    store(shares, exp(lead));
    for (int64_t i = 0; i < LANES; i++) {
      if (tops[i] < least || leads[i] < -LARGEST_GUMBEL) continue;
      if (!draw_words(philox, first + i, least_word(shares[i]), words)) continue;
      compete(row.group(first + i, buffer), words, scale, least, (first + i) * GROUP, &best);
    }
  }
  return best.token;
}

template <class T>
static int64_t choose(const Row<T>& row, const Wish& wish, const Memory& memory) {
  float top = find_maxima(row, memory.maxima);
  if (!(top > -INF)) return -1;
  if (!(wish.temperature > 0)) {
    alignas(64) float buffer[GROUP];
    int64_t g = 0, i = 0;
    while (memory.maxima[g] != top) g++;
    for (const float* x = row.group(g, buffer); x[i] != top;) i++;
    return g * GROUP + i;
  }
  Scale scale{top, wish.temperature};
  float least = wish.min_score;
  int64_t k = min(wish.top_k, row.size);
  if (k > 0) least = top_k_border(row, scale, least, k, memory);
  if (wish.top_p < 1) least = top_p_border(row, scale, least, wish.top_p, memory);
  return draw(row, wish, scale, least, memory.maxima);
}

template <class T>
static void sample_rows(const Sampling& s, bool any_edits, const Team& team) {
  int64_t maxima = maxima_size(s.vocab_size), scores = up_to(s.vocab_size, GROUP) + LANES;
  Memory memory;
  int64_t floats = maxima + scores + (any_edits ? s.vocab_size : 0);
  memory.masses = (double*)team.scratch(scores * sizeof(double) + floats * sizeof(float));
  memory.maxima = (float*)(memory.masses + scores);
  memory.scores = memory.maxima + maxima;
  memory.edited = memory.scores + scores;
  for (int64_t r; (r = team.take()) < s.num_rows;) {
    const Wish& wish = s.wishes[r];
    Row<T> row{(const T*)s.logits + r * s.stride, s.vocab_size};
    bool edits = wish.mask >= 0 || wish.edits_end > wish.edits_begin || wish.history_end > wish.history_begin;
    if (!edits)
      s.tokens[r] = choose(row, wish, memory);
    else if (edit(s, wish, row, memory))
      s.tokens[r] = choose(Row<float>{memory.edited, s.vocab_size}, wish, memory);
    else
      s.tokens[r] = -1;
  }
}

// logits (num_rows, vocab_size), wishes (num_rows,), tokens (num_rows,) int64, dtype (0 float32, 1 bf16), num_rows,
// vocab_size, stride of rows, masks (uint32 rows) or None, edited tokens (int64) or None, their values,
// tokens of the history (int64) or None, whether of the output (bool)
void sample(const Arg* a, const Team& team) {
  Sampling s;
  s.logits = (const char*)a[0].data;
  s.wishes = (const Wish*)a[1].data;
  s.tokens = (int64_t*)a[2].data;
  int64_t* numbers[] = {&s.is_bf16, &s.num_rows, &s.vocab_size, &s.stride};
  for (int i = 0; i < 4; i++) *numbers[i] = a[3 + i].integer;
  s.masks = (const uint32_t*)a[7].data;
  s.edit_tokens = (const int64_t*)a[8].data;
  s.edit_values = (const float*)a[9].data;
  s.history_tokens = (const int64_t*)a[10].data;
  s.are_output = (const uint8_t*)a[11].data;
  bool any_edits = s.masks || s.edit_tokens || s.history_tokens;
  if (s.is_bf16)
    sample_rows<bf16>(s, any_edits, team);
  else
    sample_rows<float>(s, any_edits, team);
}

}  // namespace quire::ISA
