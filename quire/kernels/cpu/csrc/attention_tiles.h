// The part of attention.cpp that uses AMX: 32 rows of queries times 32 keys at once.
//
// Stored keys are tiles already. The values of a step are copied together, so that a tile has 32 tokens of them. The
// softmax weights between the two products are written as tiles of 16 rows and 32 tokens.
//
// Sums and weighted values are rescaled only when a maximum has grown by more than a factor of 2^SLACK. Until then
// weights can be above 1, which costs no precision.
constexpr int64_t TILES_FROM_ROWS = 4;  // with fewer rows, vectors read memory as fast
constexpr int64_t TILE_GROUPS = STEP_TOKENS / 32;       // of 32 tokens
constexpr int64_t TILE_ROWS = 32;                            // rows at once
constexpr int64_t SCORE_STRIDE = STEP_TOKENS + 16;  // no power of two, so that rows do not share cache sets
constexpr float SLACK = 8.0f;

INLINE bool may_use_tiles(const Attention& a) {
  return a.stored == Stored::bfloat16 && !a.strict && a.head_dim % 32 == 0 && a.scale > 0;
}
INLINE bool fits_tiles(const Attention& a, const Item& item) {
  return may_use_tiles(a) && item.rows >= TILES_FROM_ROWS;
}

struct Tiles {
  char* values;      // [STEP_TOKENS / 2][head_dim][2]
  float* scores[2];  // [TILE_ROWS][SCORE_STRIDE], used alternately
  char* weights[2];  // [TILE_ROWS / 16][TILE_GROUPS][16][32]
};

constexpr int64_t SCORE_BYTES = TILE_ROWS * SCORE_STRIDE * 4;
constexpr int64_t WEIGHT_BYTES = TILE_ROWS * STEP_TOKENS * 2;
INLINE int64_t tile_bytes(const Attention& a) {
  return STEP_TOKENS * a.padded * 2 + 2 * (SCORE_BYTES + WEIGHT_BYTES);
}
INLINE Tiles tiles_in(const Attention& a, char* values) {
  char* weights = values + STEP_TOKENS * a.padded * 2;
  float* scores = (float*)(weights + 2 * WEIGHT_BYTES);
  return {values, {scores, scores + SCORE_BYTES / 4}, {weights, weights + WEIGHT_BYTES}};
}

// Copies rows of q to tiles [row / 16][head_dim / 32][16][32], and resets the rows' state.
static void begin_tile_rows(const Attention& a, const Item& item, const Rows& rows) {
  int64_t padded_rows = up_to(item.rows, TILE_ROWS), row_tile = a.head_dim * 32;
  for (int64_t i = 0; i < padded_rows; i++) {
    char* target = (char*)rows.q + i / 16 * row_tile + i % 16 * 64;
    const char* q = (const char*)query<bf16>(a, item, min(i, item.rows - 1));
    for (int64_t d = 0; d < a.head_dim / 32; d++) memcpy(target + d * TILE_BYTES, q + d * 64, 64);
    rows.tops[i] = LOWEST;
  }
  memset(rows.sums, 0, padded_rows * 16 * sizeof(float));
  memset(rows.values, 0, padded_rows * a.padded * sizeof(float));
}

INLINE void prefetch_part(const Attention& a, const char* part) {
  for (int64_t at = 0; at < a.part_bytes; at += 64) _mm_prefetch(part + at, _MM_HINT_T1);
}

// Copies the values of a step together. Prefetches the parts that are needed next.
static void gather_values(const Attention& a, const int64_t* places, const int64_t* coming, int64_t parts,
                          const Tiles& tiles) {
  for (int64_t i = 0; i < parts; i++) {
    prefetch_part(a, a.values + coming[i]);
    memcpy(tiles.values + i * a.part_bytes, a.values + places[i], a.part_bytes);
  }
  if (parts % 2) memset(tiles.values + parts * a.part_bytes, 0, a.part_bytes);
}

// Scores of 32 rows (16 if not BOTH) and the keys of two parts.
template <bool BOTH>
INLINE void score_tiles(const char* q, int64_t row_tile, const char* keys0, const char* keys1, float* scores) {
  _tile_zero(0);
  _tile_zero(1);
  if (BOTH) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t at = 0; at < row_tile; at += TILE_BYTES) {
    _tile_loadd(6, keys0 + at, 64);
    _tile_loadd(4, q + at, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, keys1 + at, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (BOTH) {
      _tile_loadd(5, q + row_tile + at, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, scores, SCORE_STRIDE * 4);
  _tile_stored(1, scores + 16, SCORE_STRIDE * 4);
  if (BOTH) {
    _tile_stored(2, scores + 16 * SCORE_STRIDE, SCORE_STRIDE * 4);
    _tile_stored(3, scores + 16 * SCORE_STRIDE + 16, SCORE_STRIDE * 4);
  }
}

// Adds weights * values to `sums` (32 or 16 rows, padded), for 32 dimensions.
template <bool BOTH>
INLINE void weigh_tiles(const char* weights, const char* values, int64_t groups, int64_t padded, float* sums) {
  int64_t stride = padded * 4;
  _tile_loadd(0, sums, stride);
  _tile_loadd(1, sums + 16, stride);
  if (BOTH) {
    _tile_loadd(2, sums + 16 * padded, stride);
    _tile_loadd(3, sums + 16 * padded + 16, stride);
  }
  for (int64_t g = 0; g < groups; g++) {
    _tile_loadd(6, values + g * 16 * stride, stride);
    _tile_loadd(4, weights + g * TILE_BYTES, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, values + g * 16 * stride + 64, stride);
    _tile_dpbf16ps(1, 4, 7);
    if (BOTH) {
      _tile_loadd(5, weights + (TILE_GROUPS + g) * TILE_BYTES, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, stride);
  _tile_stored(1, sums + 16, stride);
  if (BOTH) {
    _tile_stored(2, sums + 16 * padded, stride);
    _tile_stored(3, sums + 16 * padded + 16, stride);
  }
}

// Sets the scores of keys that a row must not attend to to -inf.
INLINE void mask_scores(float* scores, int64_t groups, Seen seen) {
  IVec lanes = lane_numbers();
  Vec nothing = splat(-__builtin_inff());
  for (int32_t i = 0; i < seen.from; i += 16)
    store(scores + i, select(lanes + i >= seen.from, load(scores + i), nothing));
  for (int32_t i = seen.to / 16 * 16; i < groups * 32; i += 16)
    store(scores + i, select(lanes + i < seen.to, load(scores + i), nothing));
}

// The maximum of a row's scores. Caps and masks the scores in place; the scale is not applied.
INLINE float largest_score(const Attention& a, float* scores, int64_t groups, Seen seen) {
  if (a.softcap > 0)
    for (int64_t i = 0; i < groups * 32; i += 16)
      store(scores + i, capped(load(scores + i) * a.scale, a.softcap) * (1.0f / a.scale));
  mask_scores(scores, groups, seen);
  Vec even = load(scores), odd = load(scores + 16);
  for (int64_t g = 1; g < groups; g++) {
    even = vmax(even, load(scores + g * 32));
    odd = vmax(odd, load(scores + g * 32 + 16));
  }
  return largest(vmax(even, odd));
}

// Turns scores of one row into weights, and updates its maximum, sums and weighted values.
INLINE void weights_of(const Attention& a, const Rows& rows, int64_t row, float* scores, char* weights, int64_t groups,
                       Seen seen) {
  float top = largest_score(a, scores, groups, seen) * a.scale, before = rows.tops[row];
  Vec total = load(rows.sums + row * 16);
  if (top > before + SLACK) {
    Vec rescale = power_of_two<float>(splat(before - top));
    rows.tops[row] = top;
    total *= rescale;
    float* values = rows.values + row * a.padded;
    for (int64_t d = 0; d < a.padded; d += 16) store(values + d, load(values + d) * rescale);
  } else {
    top = before;
  }
  Vec scales = splat(a.scale), tops = splat(top);
  for (int64_t g = 0; g < groups; g++) {
    Vec w0 = power_of_two<bf16>((Vec)_mm512_fmsub_ps((__m512)load(scores + g * 32), (__m512)scales, (__m512)tops));
    Vec w1 = power_of_two<bf16>((Vec)_mm512_fmsub_ps((__m512)load(scores + g * 32 + 16), (__m512)scales, (__m512)tops));
    total += w0 + w1;
    _mm512_storeu_si512(weights + g * TILE_BYTES, (__m512i)_mm512_cvtne2ps_pbh((__m512)w1, (__m512)w0));
  }
  store(rows.sums + row * 16, total);
}

// Up to TILE_ROWS rows in one step.
struct Pass {
  int64_t row, count;
  int64_t parts, groups;  // of the step, up to the last key of any of the rows
  const int64_t* coming;  // the parts that are needed next, or null if this pass does not prefetch
  Seen seen[TILE_ROWS];
};

INLINE void score_group(const Attention& a, const Rows& rows, const Pass& pass, const int64_t* places, int64_t g,
                        float* scores) {
  int64_t row_tile = a.head_dim * 32, first = 2 * g, second = min(2 * g + 1, pass.parts - 1);
  const char* q = (const char*)rows.q + pass.row / 16 * row_tile;
  if (pass.coming) {
    prefetch_part(a, a.keys + pass.coming[first]);
    prefetch_part(a, a.keys + pass.coming[second]);
  }
  if (pass.count > 16)
    score_tiles<true>(q, row_tile, a.keys + places[first], a.keys + places[second], scores + g * 32);
  else
    score_tiles<false>(q, row_tile, a.keys + places[first], a.keys + places[second], scores + g * 32);
}

INLINE void weigh_columns(const Attention& a, const Rows& rows, const Pass& pass, const Tiles& tiles, int64_t d,
                          const char* weights) {
  float* sums = rows.values + pass.row * a.padded + d;
  if (pass.count > 16)
    weigh_tiles<true>(weights, tiles.values + d * 4, pass.groups, a.padded, sums);
  else
    weigh_tiles<false>(weights, tiles.values + d * 4, pass.groups, a.padded, sums);
}

// All passes of one step. Vector code that turns the scores of one pass into weights is interleaved with tile code that
// weighs the values of the previous pass and computes the scores of the next one, so that both kinds of units are busy.
static void run_passes(const Attention& a, const Rows& rows, const Tiles& tiles, const int64_t* places,
                       const Pass* passes, int64_t count) {
  for (int64_t g = 0; g < passes[0].groups; g++) score_group(a, rows, passes[0], places, g, tiles.scores[0]);
  for (int64_t i = 0; i < count; i++) {
    const Pass& pass = passes[i];
    int64_t columns = i > 0 ? a.padded / 32 : 0, groups = i + 1 < count ? passes[i + 1].groups : 0;
    int64_t units = columns + groups, unit = 0;
    float* scores = tiles.scores[i % 2];
    char* weights = tiles.weights[i % 2];
    for (int64_t r = 0; r < pass.count; r++) {
      char* target = weights + r / 16 * TILE_GROUPS * TILE_BYTES + r % 16 * 64;
      weights_of(a, rows, pass.row + r, scores + r * SCORE_STRIDE, target, pass.groups, pass.seen[r]);
      for (; unit * pass.count < (r + 1) * units; unit++) {
        if (unit < columns)
          weigh_columns(a, rows, passes[i - 1], tiles, unit * 32, tiles.weights[(i + 1) % 2]);
        else
          score_group(a, rows, passes[i + 1], places, unit - columns, tiles.scores[(i + 1) % 2]);
      }
    }
  }
  for (int64_t d = 0; d < a.padded; d += 32)
    weigh_columns(a, rows, passes[count - 1], tiles, d, tiles.weights[(count - 1) % 2]);
}

template <bool PAGED>
static void attend_with_tiles(const Attention& a, const Item& item, Queue* queue, const Rows& rows, char* memory) {
  Tiles tiles = tiles_in(a, memory);
  begin_tile_rows(a, item, rows);
  int64_t places[2][STEP_PARTS], end;
  for (int64_t begin = item.begin; begin < item.end; begin = end) {
    end = min(item.end, (begin / STEP_TOKENS + 1) * STEP_TOKENS);
    int64_t parts = locate<PAGED>(a, item.chunk, item.head, begin, end, places[0]);
    int64_t coming = locate_coming<PAGED>(a, item, end, queue, places[1]);
    for (int64_t i = coming; i < parts; i++) places[1][i] = places[0][i];  // prefetches cached memory, which is cheap
    gather_values(a, places[0], places[1], parts, tiles);
    Pass passes[MAX_ROWS / TILE_ROWS];
    int64_t count = 0;
    for (int64_t row = 0; row < item.rows; row += TILE_ROWS) {
      Pass& pass = passes[count];
      int64_t seen_end = end;
      pass.row = row;
      pass.count = min(TILE_ROWS, item.rows - row);
      if (!look(a, rows.positions + row, pass.count, begin, &seen_end, pass.seen)) continue;
      pass.parts = (seen_end - begin + 15) / 16;
      pass.groups = (pass.parts + 1) / 2;
      pass.coming = count++ == 0 ? places[1] : nullptr;
    }
    if (count > 0) run_passes(a, rows, tiles, places[0], passes, count);
  }
  for (int64_t i = 0; i < item.rows; i++)
    finish_row(a, item, i, rows.values + i * a.padded, rows.tops[i], sum(load(rows.sums + i * 16)));
}
