// Arguments of an attention kernel, and the division of its work into items that threads take one by one.
//
// An item is a block of rows of one chunk and one KV head, and a range of positions. A row is a pair of a query's
// position and a query head. The heads that share the KV head are in one item, so keys and values are loaded once for
// all of them. Long items are split. Each thread computes the same list, which depends only on the arguments and the
// number of threads.
#pragma once
#include "int4.h"
#include "team.h"

namespace quire::ISA {

constexpr int64_t PART_TOKENS = 16;
constexpr int64_t STEP_TOKENS = 128;
constexpr int64_t STEP_PARTS = STEP_TOKENS / PART_TOKENS;
constexpr int64_t SPLIT_TOKENS = 512;       // the parts of a split item have at least so many on average
constexpr int64_t ITEMS_PER_THREAD = 8;     // balances load: fast threads take more items
constexpr float LOWEST = -1e30f;            // the initial maximum: finite, so that differences are not NaN
constexpr int ROWS_AT_ONCE = VECTORS_AT_ONCE > 8 ? 8 : VECTORS_AT_ONCE > 4 ? 4 : 2;  // rows of one vector kernel
#if defined(__AMX_TILE__)
constexpr int64_t MAX_ROWS = 256;  // of an item
#else
constexpr int64_t MAX_ROWS = 128;
#endif

struct Attention {
  const char* q;
  char* out;
  const char* keys;  // of the layer
  const char* values;
  const int64_t* starts;
  const int64_t* stops;
  const int64_t* tables;
  float* scratch;  // (scratch_rows, padded + 16): weighted values, maximum, sum
  Stored stored;
  int64_t is_bf16;  // queries and results; otherwise they are float32
  int64_t strict, layer, num_chunks, num_heads, kv_heads, head_dim, block_size, num_blocks;
  int64_t table_stride, q_stride, window, scratch_rows;
  float scale, softcap;  // scores are to base 2: both include log2(e)
  int64_t shared;        // query heads per KV head
  int64_t padded;        // head_dim padded to a multiple of 16, in int4 of INT4_UNIT
  int64_t part_bytes;    // of the keys, or the values, of a part
  int64_t scales_at;     // offset of the scales in a part, in bytes
  int64_t units;         // of a head in int4
  int64_t max_rows;      // of an item
};

struct Item {
  int64_t chunk, token;  // the chunk, and the index of its first token in the step
  int64_t row, rows, head;
  int64_t begin, end;  // positions; begin is a multiple of PART_TOKENS
  int64_t partial;     // first row of scratch for partial results, or -1 if the item is not split
};

struct Merge {
  Item item;  // of the first part
  int64_t parts;
};

// ---- the list of items ----

struct Work {
  Item* items;
  Merge* merges;
  int64_t num_items, num_merges;
};

INLINE int64_t position_of(const Attention& a, const Item& item, int64_t row) {
  return a.starts[item.chunk] + (item.row + row) / a.shared;
}
INLINE int64_t first_seen(const Attention& a, int64_t position) {
  return a.window ? max(0, position - a.window + 1) : 0;
}
INLINE int64_t cost_of(const Item& item) { return (item.end - item.begin) * up_to(item.rows, 8); }

// Calls visit(item) for each block of rows of each chunk, for head 0 and before splitting.
template <class Visit>
INLINE void each_block(const Attention& a, Visit visit) {
  int64_t token = 0;
  for (int64_t chunk = 0; chunk < a.num_chunks; chunk++) {
    int64_t length = a.stops[chunk] - a.starts[chunk], rows = length * a.shared;
    for (int64_t row = 0; row < rows; row += a.max_rows) {
      Item item = {chunk, token, row, min(a.max_rows, rows - row), 0, 0, 0, -1};
      item.begin = first_seen(a, position_of(a, item, 0)) / PART_TOKENS * PART_TOKENS;
      item.end = position_of(a, item, item.rows - 1) + 1;
      visit(item);
    }
    token += length;
  }
}

struct Splitter {
  int64_t limit;      // target cost of an item
  int64_t rows_left;  // free rows of scratch
  int64_t parts(const Item& item) {
    int64_t parts = min((cost_of(item) + limit - 1) / limit, (item.end - item.begin) / SPLIT_TOKENS);
    parts = min(parts, rows_left / item.rows);
    if (parts < 2) return 1;
    rows_left -= parts * item.rows;
    return parts;
  }
};

INLINE int class_of(int64_t cost) {  // lower classes cost more; four classes per factor of two
  int log = 63 - __builtin_clzll((uint64_t)cost | 4);
  return 255 - (log * 4 + (int)((cost >> (log - 2)) & 3));
}

INLINE Item part_of(const Item& item, int64_t i, int64_t parts) {
  int64_t first = item.begin / STEP_TOKENS, last = (item.end + STEP_TOKENS - 1) / STEP_TOKENS;
  Item part = item;
  if (parts == 1) return part;
  part.begin = max(item.begin, (first + (last - first) * i / parts) * STEP_TOKENS);
  part.end = min(item.end, (first + (last - first) * (i + 1) / parts) * STEP_TOKENS);
  part.partial = item.partial + i * item.rows;
  return part;
}

// Sets a->max_rows, and returns the splitter, from the total rows and cost of the step.
static Splitter measure(Attention* a, const Team& team) {
  int64_t rows = 0, cost = 0;
  for (int64_t chunk = 0; chunk < a->num_chunks; chunk++) rows += (a->stops[chunk] - a->starts[chunk]) * a->shared;
  int64_t wanted = rows * a->kv_heads / (team.size * ITEMS_PER_THREAD);
  a->max_rows = max(32, min(MAX_ROWS, up_to(wanted, 32)));
  each_block(*a, [&](const Item& item) { cost += cost_of(item) * a->kv_heads; });
  bool alone = a->strict || team.size == 1;
  return {max(1, cost / (team.size * ITEMS_PER_THREAD)), alone ? 0 : a->scratch_rows};
}

// Counts items and merges, and items per class.
static void count_work(const Attention& a, Splitter splitter, Work* work, int64_t* by_class) {
  work->num_items = work->num_merges = 0;
  each_block(a, [&](const Item& item) {
    for (int64_t head = 0; head < a.kv_heads; head++) {
      int64_t parts = splitter.parts(item);
      by_class[class_of(cost_of(item) / parts)] += parts;
      work->num_items += parts;
      work->num_merges += parts > 1;
    }
  });
}

static void list_work(const Attention& a, Splitter splitter, Work* work, int64_t* by_class) {
  int64_t places[256], before = 0, merges = 0;
  for (int i = 0; i < 256; i++) {
    places[i] = before;
    before += by_class[i];
  }
  each_block(a, [&](Item item) {
    for (item.head = 0; item.head < a.kv_heads; item.head++) {
      int64_t partial = a.scratch_rows - splitter.rows_left;
      int64_t parts = splitter.parts(item), kind = class_of(cost_of(item) / parts);
      item.partial = parts > 1 ? partial : -1;
      for (int64_t i = 0; i < parts; i++) work->items[places[kind]++] = part_of(item, i, parts);
      if (parts > 1) work->merges[merges++] = {item, parts};
    }
  });
}

// The items of a thread. `peek` takes the next item early, so that its first step can be prefetched.
struct Queue {
  const Team& team;
  const Work& work;
  int64_t coming = -1;
  const Item* peek() {
    if (coming < 0) coming = team.take();
    return coming < work.num_items ? work.items + coming : nullptr;
  }
  const Item* take() {
    const Item* item = peek();
    coming = -1;
    return item;
  }
};

}  // namespace quire::ISA
