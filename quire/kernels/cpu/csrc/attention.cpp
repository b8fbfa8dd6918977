// Paged attention of the queries of chunks to keys and values in blocks.
//
// Storage is (num_layers, 2, num_blocks, kv_heads, block_size / 16, 16 * Dp): parts of 16 tokens of one head, with
// Dp = head_dim padded by zeros to a multiple of 16. Keys of a part: bf16 [Dp / 2][16][2], float32 [Dp][16]. Values:
// bf16 [8][Dp][2], float32 [16][Dp]. The dot-product instructions read this layout, and keys are AMX tiles.
//
// Parts of 8-bit numbers are keys [Dp / 4][16][4], or values [4][Dp][4], and 16 float32 scales, one for each token. See
// terms.h for the order of four bytes. fp8 is multiplied in floats. int8 is multiplied in integers: queries are rounded to
// 8 bits with a scale for each row, and keys are stored as key + 128 in the order of dimensions. The products of softmax
// weights and scales of values are rounded to 16 bits, or 8 where that is precise enough, with a scale for each row and
// step.
//
// Threads take items of work (see attention_items.h) one by one, the most expensive first. An item processes its
// positions in steps with a running maximum and sum (Milakov and Gimelshein 2018, Dao et al. 2022). The parts of a
// split item write maxima, sums and weighted values to scratch, and are merged after a barrier.
//
// int4 is expanded to int8, one step at a time: see attention_int4.h. Queries are rotated as its keys are, and results are
// rotated back.
//
// A strict call splits no item, and uses no tile registers and no weights of 8 bits. Its steps end at multiples of STEP_TOKENS, and masked keys
// do not change a row's state, bit for bit. So a row's result depends on its own sequence only.
#include "attention_int4.h"
#include "tile_registers.h"

namespace quire::ISA {

// ---- blocks ----

// Writes the byte offsets of the parts of positions [begin, end). Returns the number of parts.
template <bool PAGED>
static int64_t locate(const Attention& a, int64_t chunk, int64_t head, int64_t begin, int64_t end, int64_t* places) {
  const int64_t* table = a.tables + chunk * a.table_stride;
  int64_t parts_per_block = a.block_size / PART_TOKENS, part = begin / PART_TOKENS, count = 0;
  int64_t block = part / parts_per_block, within = part % parts_per_block;
  for (; part * PART_TOKENS < end; block++, within = 0) {
    int64_t id = PAGED ? table[block] : table[0] + block;
    int64_t first = (id * a.kv_heads + head) * parts_per_block;
    for (; within < parts_per_block && part * PART_TOKENS < end; within++, part++)
      places[count++] = (first + within) * a.part_bytes;
  }
  return count;
}

// ---- items ----

// A thread's state of the rows of an item.
struct Rows {
  void* q;        // [row][padded]
  float* scales;   // [row]: of scores; includes that of q if q is rounded to integers
  int32_t* begin;  // [row]: see State
  float* tops;    // [row / ROWS_AT_ONCE][16]
  float* sums;    // [row][16]
  float* masses;  // [row][16]
  float* values;  // [row][padded]
  int32_t positions[MAX_ROWS];
};

static void finish_row(const Attention& a, const Item& item, int64_t row, const float* values, float top, float total) {
  if (item.partial >= 0) {
    float* target = a.scratch + (item.partial + row) * (a.padded + 16);
    memcpy(target, values, a.padded * sizeof(float));
    target[a.padded] = top;
    target[a.padded + 1] = total;
    return;
  }
  int64_t token = item.token + (item.row + row) / a.shared, head = item.head * a.shared + (item.row + row) % a.shared;
  int64_t place = (token * a.num_heads + head) * a.head_dim;
  float factor = 1.0f / total;
  alignas(64) float rotated_back[MAX_HEAD_DIM];
  if (a.stored == Stored::int4) {
    hadamard_of(values, a.padded, a.padded, rotated_back);
    values = rotated_back;
  }
  for (int64_t d = 0; d < a.head_dim; d += 16) {
    Vec v = load(values + d) * factor;
    if (a.is_bf16)
      store_some((bf16*)a.out + place + d, v, min(16, a.head_dim - d));
    else
      store_some((float*)a.out + place + d, v, min(16, a.head_dim - d));
  }
}

template <class T>
INLINE const T* query(const Attention& a, const Item& item, int64_t row) {
  int64_t token = item.token + (item.row + row) / a.shared, head = item.head * a.shared + (item.row + row) % a.shared;
  return (const T*)a.q + token * a.q_stride + head * a.head_dim;
}

static void find_positions(const Attention& a, const Item& item, Rows* rows) {
  int64_t position = position_of(a, item, 0), head = item.row % a.shared;
  for (int64_t i = 0; i < item.rows; i++) {
    rows->positions[i] = (int32_t)position;
    if (++head == a.shared) {
      head = 0;
      position++;
    }
  }
}

// The type of the queries of rows that are not rounded to integers.
template <class T>
struct Query {
  using Type = T;
};
template <class X>
struct Query<Fp8<X>> {
  using Type = X;
};

// Rounds a query to codes, for int4 after its rotation: see round_row.
template <class X>
static float round_query(const Attention& a, const X* q, int8_t* codes, int32_t* total) {
  if (a.stored != Stored::int4) return round_row(q, a.head_dim, codes, total);
  alignas(64) float rotated[MAX_HEAD_DIM];
  hadamard_of(q, a.head_dim, a.padded, rotated);
  return round_row((const float*)rotated, a.padded, codes, total);
}

template <class T>
static void begin_rows(const Attention& a, const Item& item, const Rows& rows) {
  auto q = (typename ScoreTerm<T>::Held*)rows.q;
  memset(q, 0, item.rows * a.padded * sizeof(*q));
  for (int64_t i = 0; i < item.rows; i++, q += a.padded) {
    rows.scales[i] = a.scale;
    if constexpr (IS_INTEGER<T>) {
      int8_t codes[MAX_HEAD_DIM];
      int32_t total;
      rows.scales[i] *= a.is_bf16 ? round_query(a, query<bf16>(a, item, i), codes, &total)
                                  : round_query(a, query<float>(a, item, i), codes, &total);
      rows.begin[i] = -ZERO_CODE * total;
      hold_codes(codes, q, a.padded);
    } else {
      hold(query<typename Query<T>::Type>(a, item, i), q, a.head_dim);
    }
  }
  for (int64_t i = 0; i < up_to(item.rows, ROWS_AT_ONCE) / ROWS_AT_ONCE; i++) store(rows.tops + i * 16, splat(LOWEST));
  memset(rows.sums, 0, item.rows * 16 * sizeof(float));
  if (IS_INTEGER<T>) memset(rows.masses, 0, item.rows * 16 * sizeof(float));
  memset(rows.values, 0, item.rows * a.padded * sizeof(float));
}

// Whether rows at `positions` attend to any of [begin, *end). Sets `seen` per row; lowers *end to the last row's end.
static bool look(const Attention& a, const int32_t* positions, int64_t count, int64_t begin, int64_t* end, Seen* seen) {
  int64_t last = positions[count - 1];
  if (last < begin || first_seen(a, positions[0]) >= *end) return false;
  for (int64_t i = 0; i < count; i++) {
    seen[i].from = (int32_t)min(*end - begin, max(0, first_seen(a, positions[i]) - begin));
    seen[i].to = (int32_t)min(*end - begin, max(0, positions[i] + 1 - begin));
  }
  *end = min(*end, last + 1);
  return true;
}

// Like `locate` for the next step to compute: the item's step from `end` on, or the first step of the next item.
template <bool PAGED>
static int64_t locate_coming(const Attention& a, const Item& item, int64_t end, Queue* queue, int64_t* places) {
  if (end < item.end) return locate<PAGED>(a, item.chunk, item.head, end, min(item.end, end + STEP_TOKENS), places);
  const Item* next = queue->peek();
  if (next == nullptr) return 0;
  int64_t next_end = min(next->end, (next->begin / STEP_TOKENS + 1) * STEP_TOKENS);
  return locate<PAGED>(a, next->chunk, next->head, next->begin, next_end, places);
}

// expanded: memory for keys and values of a step, if they are stored in int4; otherwise null.
template <class T, bool PAGED>
static void attend(const Attention& stored, const Item& item, Queue* queue, const Rows& rows, char* expanded = nullptr) {
  Attention a = stored;
  if (expanded) a = expanded_in(stored, expanded);
  begin_rows<T>(stored, item, rows);
  int64_t places[2][STEP_PARTS], end;
  for (int64_t begin = item.begin; begin < item.end; begin = end) {
    end = min(item.end, (begin / STEP_TOKENS + 1) * STEP_TOKENS);
    int64_t parts = locate<PAGED>(stored, item.chunk, item.head, begin, end, places[0]);
    int64_t coming = locate_coming<PAGED>(stored, item, end, queue, places[1]);
    for (int64_t i = coming; i < parts; i++) places[1][i] = places[0][i];  // prefetches cached memory, which is cheap
    bool first = expanded == nullptr;
    if (expanded) expand(stored, places[0], places[1], parts, a);
    for (int64_t row = 0; row < item.rows; row += ROWS_AT_ONCE) {
      Seen seen[ROWS_AT_ONCE];
      int64_t count = min(ROWS_AT_ONCE, item.rows - row);
      int64_t seen_end = end;
      if (!look(a, rows.positions + row, count, begin, &seen_end, seen)) continue;
      Span span = {places[0], first ? places[1] : nullptr, (seen_end - begin + 15) / 16};
      State state = {rows.scales + row, rows.begin + row, rows.tops + row / ROWS_AT_ONCE * 16, rows.sums + row * 16,
                     rows.masses + row * 16, rows.values + row * a.padded};
      step_some_rows<T>(a, count, (const typename ScoreTerm<T>::Held*)rows.q + row * a.padded, span, seen, state);
      first = false;
    }
  }
  for (int64_t i = 0; i < item.rows; i++)
    finish_row(stored, item, i, rows.values + i * a.padded, rows.tops[i / ROWS_AT_ONCE * 16 + i % ROWS_AT_ONCE],
               sum(load(rows.sums + i * 16)));
}

// Merges the partial results of one row of a split item.
static void merge_row(const Attention& a, const Merge& merge, int64_t row) {
  alignas(64) float values[MAX_HEAD_DIM] = {};
  int64_t stride = a.padded + 16;
  const float* first = a.scratch + (merge.item.partial + row) * stride;
  float top = LOWEST, total = 0;
  for (int64_t i = 0; i < merge.parts; i++) top = maxf(top, first[i * merge.item.rows * stride + a.padded]);
  for (int64_t i = 0; i < merge.parts; i++) {
    const float* part = first + i * merge.item.rows * stride;
    float weight = power_of_two<float>(splat(part[a.padded] - top))[0];
    total += weight * part[a.padded + 1];
    for (int64_t d = 0; d < a.padded; d += 16) store(values + d, fma(splat(weight), load(part + d), load(values + d)));
  }
  Item whole = merge.item;
  whole.partial = -1;
  finish_row(a, whole, row, values, top, total);
}

static void merge_all(const Attention& a, const Work& work, const Team& team) {
  int64_t rows = 0, begin, end;
  for (int64_t i = 0; i < work.num_merges; i++) rows += work.merges[i].item.rows;
  team.share(rows, 1, &begin, &end);
  int64_t before = 0;
  for (int64_t i = 0; i < work.num_merges; before += work.merges[i++].item.rows)
    for (int64_t row = max(0, begin - before); row < min(work.merges[i].item.rows, end - before); row++)
      merge_row(a, work.merges[i], row);
}

#if defined(HAS_TILES)
#include "attention_tiles.h"
#else
constexpr int64_t tile_bytes(const Attention&) { return 0; }
#endif

template <bool PAGED>
static void attend_item(const Attention& a, const Item& item, Queue* queue, Rows& rows, char* tiles, char* expanded) {
  find_positions(a, item, &rows);
#if defined(HAS_TILES)
  if (fits_tiles(a, item)) return attend_with_tiles<PAGED>(a, item, queue, rows, tiles);
#endif
  (void)tiles;
  switch (a.stored) {
    case Stored::float32:
      return attend<float, PAGED>(a, item, queue, rows);
    case Stored::bfloat16:
      return attend<bf16, PAGED>(a, item, queue, rows);
    case Stored::int8:
      return attend<int8_t, PAGED>(a, item, queue, rows);
    case Stored::fp8:
      return a.is_bf16 ? attend<Fp8<bf16>, PAGED>(a, item, queue, rows) : attend<Fp8<float>, PAGED>(a, item, queue, rows);
    case Stored::int4:
      return attend<int8_t, PAGED>(a, item, queue, rows, expanded);
  }
}

template <bool PAGED>
static void attend_all(Attention& a, const Team& team) {
  Splitter splitter = measure(&a, team);
  int64_t by_class[256] = {};
  Work work;
  count_work(a, splitter, &work, by_class);
  int64_t sizes[] = {
      work.num_items * (int64_t)sizeof(Item), work.num_merges * (int64_t)sizeof(Merge), a.max_rows * a.padded * 4,
      a.max_rows * a.padded * 4, a.max_rows * 64, a.max_rows * 64, a.max_rows * 64, a.max_rows * 4,
      a.max_rows * 4, tile_bytes(a), expanded_bytes(a)};
  char* memory[12];
  int64_t all = 0;
  for (int64_t size : sizes) all += up_to(size, 64);
  memory[0] = (char*)team.scratch(all);
  for (int i = 0; i < 11; i++) memory[i + 1] = memory[i] + up_to(sizes[i], 64);
  work.items = (Item*)memory[0];
  work.merges = (Merge*)memory[1];
  Rows rows = {memory[2],         (float*)memory[7], (int32_t*)memory[8], (float*)memory[4],
               (float*)memory[5], (float*)memory[6], (float*)memory[3],   {}};
  list_work(a, splitter, &work, by_class);

  Queue queue = {team, work};
#if defined(HAS_TILES)
  if (may_use_tiles(a)) begin_tiles();
#endif
  while (const Item* item = queue.take()) attend_item<PAGED>(a, *item, &queue, rows, memory[9], memory[10]);
#if defined(HAS_TILES)
  if (may_use_tiles(a)) _tile_release();
#endif
  if (work.num_merges == 0) return;
  team.barrier();
  merge_all(a, work, team);
}

// q, out, storage, starts, stops, tables, scratch, dtype of q and out, Stored, integers in the order of `numbers`, scale,
// softcap
static Attention read(const Arg* args) {
  Attention a;
  a.q = (const char*)args[0].data;
  a.out = (char*)args[1].data;
  a.starts = (const int64_t*)args[3].data;
  a.stops = (const int64_t*)args[4].data;
  a.tables = (const int64_t*)args[5].data;
  a.scratch = (float*)args[6].data;
  a.is_bf16 = args[7].integer;
  a.stored = (Stored)args[8].integer;
  int64_t* numbers[] = {&a.strict,     &a.layer,      &a.num_chunks,   &a.num_heads, &a.kv_heads, &a.head_dim,
                        &a.block_size, &a.num_blocks, &a.table_stride, &a.q_stride,  &a.window,   &a.scratch_rows};
  for (int i = 0; i < 12; i++) *numbers[i] = args[9 + i].integer;
  a.softcap = (float)(args[22].number * 1.4426950408889634);
  a.scale = (float)(args[21].number * 1.4426950408889634);
  a.shared = a.num_heads / a.kv_heads;
  a.padded = up_to(a.head_dim, a.stored == Stored::int4 ? INT4_UNIT : 16);
  a.units = a.padded / INT4_UNIT;
  a.scales_at = PART_TOKENS * a.padded * (a.stored == Stored::float32 ? 4 : a.stored == Stored::bfloat16 ? 2 : 1);
  if (a.stored == Stored::int4) a.scales_at = PART_TOKENS * a.units * INT4_BYTES;
  a.part_bytes = a.scales_at + (a.stored >= Stored::int8 ? PART_TOKENS * 4 : 0);
  int64_t bytes = a.num_blocks * a.kv_heads * (a.block_size / PART_TOKENS) * a.part_bytes;
  a.keys = (const char*)args[2].data + a.layer * 2 * bytes;
  a.values = a.keys + bytes;
  return a;
}

void attention(const Arg* args, const Team& team) {
  Attention a = read(args);
  attend_all<true>(a, team);
}

// The same for block tables with consecutive ids, of which only the first entry is read: to measure the cost of paging.
void attention_contiguous(const Arg* args, const Team& team) {
  Attention a = read(args);
  attend_all<false>(a, team);
}

// Computes the slots of the step's tokens: block * block_size + offset in the block.
// starts, stops, tables, slots (num_tokens,), num_chunks, table_stride, block_size
void attention_plan(const Arg* args, const Team& team) {
  auto starts = (const int64_t*)args[0].data, stops = (const int64_t*)args[1].data;
  auto tables = (const int64_t*)args[2].data;
  auto slots = (int64_t*)args[3].data;
  int64_t num_chunks = args[4].integer, table_stride = args[5].integer, block_size = args[6].integer;
  if (team.rank != 0) return;
  for (int64_t chunk = 0; chunk < num_chunks; chunk++)
    for (int64_t position = starts[chunk]; position < stops[chunk]; position++) {
      int64_t block = tables[chunk * table_stride + position / block_size];
      *slots++ = block * block_size + position % block_size;
    }
}

}  // namespace quire::ISA
