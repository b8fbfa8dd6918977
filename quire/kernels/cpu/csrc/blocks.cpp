// KV blocks: (num_layers, 2, num_blocks, kv_heads, block_size / 16, 16 * depth); index 0 of the second axis is keys.
// depth is head_dim padded by zeros to a multiple of 16.
//
// Sixteen tokens of a head are contiguous. Keys are transposed, so that 16 scores are one vector: float32
// [depth][16 tokens], bf16 [depth / 2][16 tokens][2]. Values are [16 tokens][depth], in bf16
// [8 pairs of tokens][depth][2]. In words of 4 bytes, keys are [words][16 tokens] for both types.
#include "rows.h"

namespace quire::ISA {

typedef uint32_t __attribute__((may_alias)) Word;
typedef uint32_t Quad __attribute__((vector_size(16)));

namespace {
struct Layout {
  int64_t num_blocks, heads, block_size, dim;

  int64_t depth() const { return up_to(dim, 16); }
  // element offset of the keys, or values, of a head in a block of a layer
  int64_t offset(int64_t layer, int64_t is_value, int64_t block, int64_t head) const {
    return (((layer * 2 + is_value) * num_blocks + block) * heads + head) * block_size * depth();
  }
};
}  // namespace

// ---- keys ----

INLINE Quad load_quad(const Word* p) {
  Quad q;
  memcpy(&q, p, 16);
  return q;
}

INLINE void transpose(Quad* rows) {
  const Quad low = {0, 4, 1, 5}, high = {2, 6, 3, 7}, first = {0, 1, 4, 5}, second = {2, 3, 6, 7};
  Quad a = __builtin_shuffle(rows[0], rows[1], low), b = __builtin_shuffle(rows[2], rows[3], low);
  Quad c = __builtin_shuffle(rows[0], rows[1], high), d = __builtin_shuffle(rows[2], rows[3], high);
  rows[0] = __builtin_shuffle(a, b, first);
  rows[1] = __builtin_shuffle(a, b, second);
  rows[2] = __builtin_shuffle(c, d, first);
  rows[3] = __builtin_shuffle(c, d, second);
}

// Writes the keys of `count` tokens, rows of `words`, to tokens [place, place + count) of sixteen.
static void put_keys(const Word* rows, Word* sixteen, int64_t place, int64_t count, int64_t words) {
  for (int64_t t = 0; t < count;) {
    const Word* row = rows + t * words;
    Word* out = sixteen + place + t;
    if ((place + t) % 4 || t + 4 > count) {
      for (int64_t w = 0; w < words; w++) out[w * 16] = row[w];
      t++;
      continue;
    }
    for (int64_t w = 0; w < words; w += 4) {
      Quad quads[4];
      for (int i = 0; i < 4; i++) quads[i] = load_quad(row + i * words + w);
      transpose(quads);
      for (int i = 0; i < 4; i++) memcpy(out + (w + i) * 16, &quads[i], 16);
    }
    t += 4;
  }
}

// Reads all sixteen keys as rows of `words`.
static void get_keys(const Word* sixteen, Word* rows, int64_t words) {
  for (int64_t t = 0; t < 16; t += 4)
    for (int64_t w = 0; w < words; w += 4) {
      Quad quads[4];
      for (int i = 0; i < 4; i++) quads[i] = load_quad(sixteen + (w + i) * 16 + t);
      transpose(quads);
      for (int i = 0; i < 4; i++) memcpy(rows + (t + i) * words + w, &quads[i], 16);
    }
}

// ---- values ----

// Writes the values of `count` tokens, `stride` elements apart, to tokens [place, place + count) of sixteen.
template <class T>
static void put_values(const T* v, int64_t stride, float* sixteen, int64_t place, int64_t count, const Layout& layout) {
  int64_t dim = layout.dim, depth = layout.depth();
  for (int64_t t = 0; t < count; t++)
    for (int64_t i = 0; i < depth; i += LANES)
      store(sixteen + (place + t) * depth + i, load_some(v + t * stride + i, min(LANES, dim - i)));
}

template <class T>
static void put_values(const T* v, int64_t stride, bf16* sixteen, int64_t place, int64_t count, const Layout& layout) {
  int64_t dim = layout.dim, depth = layout.depth();
  for (int64_t t = 0; t < count;) {
    const T* row = v + t * stride;
    bf16* out = sixteen + (place + t) / 2 * 2 * depth;
    bool odd = (place + t) % 2, both = !odd && t + 1 < count;
    for (int64_t i = 0; i < depth; i += LANES) {
      int64_t n = min(LANES, dim - i);
      UVec first = to_bf16(load_some(row + i, n)), pairs;
      if (both) {
        pairs = first | to_bf16(load_some(row + stride + i, n)) << 16;
      } else {
        pairs = load_bits<UVec>(out + 2 * i);
        pairs = odd ? (pairs & 0xffff) | first << 16 : (pairs & 0xffff0000u) | first;
      }
      store_bits(out + 2 * i, pairs);
    }
    t += both ? 2 : 1;
  }
}

INLINE void get_value(const float* sixteen, int64_t place, float* out, const Layout& layout) {
  memcpy(out, sixteen + place * layout.depth(), layout.dim * sizeof(float));
}
INLINE void get_value(const bf16* sixteen, int64_t place, bf16* out, const Layout& layout) {
  const bf16* row = sixteen + place / 2 * 2 * layout.depth() + place % 2;
  for (int64_t i = 0; i < layout.dim; i++) out[i] = row[2 * i];
}

// ---- writing ----

// One head of consecutive tokens. half: rotary_dim / 2; 0 for keys that are not rotated.
namespace {
template <class T>
struct Tokens {
  const T *k, *v;
  int64_t k_stride, v_stride;
  const float *cos, *sin;
  int64_t half;
};
}  // namespace

// Stores `count` tokens from slot `place` of a block on. If `place` is 0, the slots after them are zeroed.
template <class T, class K>
static void store_tokens(Tokens<T> in, K* keys, K* values, int64_t place, int64_t count, const Layout& layout, K* rows) {
  int64_t depth = layout.depth();
  if (place == 0) {
    int64_t filled = count / 16 * 16;
    memset(keys + filled * depth, 0, (layout.block_size - filled) * depth * sizeof(K));
    memset(values + filled * depth, 0, (layout.block_size - filled) * depth * sizeof(K));
  }
  while (count > 0) {
    int64_t first = place % 16, some = min(count, 16 - first), offset = (place - first) * depth;
    for (int64_t t = 0; t < some; t++)
      rotate(in.k + t * in.k_stride, rows + t * depth, in.cos + t * in.half, in.sin + t * in.half, in.half, layout.dim);
    put_keys((const Word*)rows, (Word*)(keys + offset), first, some, depth * sizeof(K) / sizeof(Word));
    put_values(in.v, in.v_stride, values + offset, first, some, layout);
    in.k += some * in.k_stride;
    in.v += some * in.v_stride;
    in.cos += some * in.half;
    in.sin += some * in.half;
    place += some;
    count -= some;
  }
}

// Zeroed scratch for sixteen rows of keys.
template <class K>
static K* zero_rows(const Layout& layout, const Team& team) {
  size_t num_bytes = 16 * layout.depth() * sizeof(K);
  return (K*)memset(team.scratch(num_bytes), 0, num_bytes);
}

namespace {
struct Slots {
  const int64_t* of_tokens;
  int64_t num_tokens, block_size;

  bool begins(int64_t token) const {  // whether it is the first token of a run of consecutive slots in one block
    return token == 0 || of_tokens[token] != of_tokens[token - 1] + 1 || of_tokens[token] % block_size == 0;
  }
  int64_t count(int64_t token) const {  // tokens of the run from this one on
    int64_t end = token + 1;
    while (end < num_tokens && !begins(end)) end++;
    return end - token;
  }
};
}  // namespace

// Threads divide pairs of a run of tokens and a head, so that no two threads write the same memory.
template <class T, class K>
static void store_step(const Tokens<T>& all, const Slots& slots, K* data, int64_t layer, const Layout& layout,
                       const Team& team) {
  int64_t heads = layout.heads, dim = layout.dim, begin, end, counted = -1, count = 0;
  part_of(team, slots.num_tokens * heads, 16 * dim, &begin, &end);  // 16 *: a key touches one cache line per word
  K* rows = zero_rows<K>(layout, team);
  for (int64_t i = begin; i < end; i++) {
    int64_t token = i / heads, head = i % heads, slot = slots.of_tokens[token];
    if (slot < 0 || slot >= layout.num_blocks * layout.block_size || !slots.begins(token)) continue;
    if (token != counted) count = slots.count(token);
    counted = token;
    int64_t block = slot / layout.block_size;
    Tokens<T> in = all;
    in.k += token * all.k_stride + head * dim;
    in.v += token * all.v_stride + head * dim;
    in.cos += token * all.half;
    in.sin += token * all.half;
    store_tokens(in, data + layout.offset(layer, 0, block, head), data + layout.offset(layer, 1, block, head),
                 slot % layout.block_size, count, layout, rows);
  }
}

template <class T>
static void rotary_write_of(const Arg* a, const Team& team) {
  int64_t tokens = a[10].integer, heads = a[11].integer, layer = a[19].integer;
  Layout layout = {a[18].integer, a[12].integer, a[17].integer, a[13].integer};
  Tokens<T> all = {(const T*)a[1].data, (const T*)a[2].data, a[15].integer, a[16].integer, (const float*)a[3].data,
                   (const float*)a[4].data, a[3].data ? a[20].integer : 0};
  Slots slots = {(const int64_t*)a[6].data, tokens, layout.block_size};
  auto q = (const T*)a[0].data;
  if (q) rotate_heads(q, a[14].integer, (T*)a[5].data, all.cos, all.sin, all.half, tokens, heads, layout.dim, team);
  if (a[9].integer)
    store_step(all, slots, (bf16*)a[7].data, layer, layout, team);
  else
    store_step(all, slots, (float*)a[7].data, layer, layout, team);
}

// q or None, k, v, cos or None, sin, q_out, slots int64 (num_tokens,), blocks, dtype, dtype of blocks, num_tokens, heads,
// kv_heads, head_dim, token strides of q, k, v, block_size, num_blocks, layer, rotary_dim / 2
// Rotates q into q_out, which is contiguous, and stores rotated k, and v. A slot is block * block_size + offset; tokens
// whose slots are outside of the blocks are not stored. The tokens of one block must be consecutive.
void rotary_write(const Arg* a, const Team& team) {
  if (a[8].integer)
    rotary_write_of<bf16>(a, team);
  else
    rotary_write_of<float>(a, team);
}

// ---- the canonical layout: (num_layers, 2, count, block_size, kv_heads, head_dim) ----

template <class K>
static void pack(const Arg* a, const Layout& layout, int64_t layers, int64_t count, const Team& team) {
  auto blocks = (const int64_t*)a[1].data;
  int64_t heads = layout.heads, dim = layout.dim, depth = layout.depth(), begin, end;
  part_of(team, layers * 2 * count * heads, layout.block_size * dim, &begin, &end);
  K* rows = (K*)team.scratch(16 * depth * sizeof(K));
  for (int64_t i = begin; i < end; i++) {
    int64_t head = i % heads, index = i / heads, plane = index / count;
    const K* in = (const K*)a[0].data + layout.offset(plane / 2, plane % 2, blocks[index % count], head);
    K* out = (K*)a[2].data + (index * layout.block_size * heads + head) * dim;
    for (int64_t place = 0; place < layout.block_size; place++, out += heads * dim) {
      const K* sixteen = in + place / 16 * 16 * depth;
      if (plane % 2) {
        get_value(sixteen, place % 16, out, layout);
        continue;
      }
      if (place % 16 == 0) get_keys((const Word*)sixteen, (Word*)rows, depth * sizeof(K) / sizeof(Word));
      memcpy(out, rows + place % 16 * depth, dim * sizeof(K));
    }
  }
}

template <class K>
static void unpack(const Arg* a, const Layout& layout, int64_t layers, int64_t count, const Team& team) {
  auto blocks = (const int64_t*)a[1].data;
  int64_t heads = layout.heads, dim = layout.dim, stride = heads * dim, begin, end;
  part_of(team, layers * count * heads, 2 * layout.block_size * dim, &begin, &end);
  K* rows = zero_rows<K>(layout, team);
  for (int64_t i = begin; i < end; i++) {
    int64_t head = i % heads, index = i / heads % count, layer = i / heads / count, block = blocks[index];
    const K* k = (const K*)a[2].data + (layer * 2 * count + index) * layout.block_size * stride + head * dim;
    Tokens<K> in = {k, k + count * layout.block_size * stride, stride, stride, nullptr, nullptr, 0};
    K* data = (K*)a[0].data;
    store_tokens(in, data + layout.offset(layer, 0, block, head), data + layout.offset(layer, 1, block, head), 0,
                 layout.block_size, layout, rows);
  }
}

// data, blocks int64 (count,), canonical, dtype, num_layers, num_blocks, count, kv_heads, block_size, head_dim
void pack_blocks(const Arg* a, const Team& team) {
  Layout layout = {a[5].integer, a[7].integer, a[8].integer, a[9].integer};
  if (a[3].integer)
    pack<bf16>(a, layout, a[4].integer, a[6].integer, team);
  else
    pack<float>(a, layout, a[4].integer, a[6].integer, team);
}

// The inverse of pack_blocks, with the same arguments.
void unpack_blocks(const Arg* a, const Team& team) {
  Layout layout = {a[5].integer, a[7].integer, a[8].integer, a[9].integer};
  if (a[3].integer)
    unpack<bf16>(a, layout, a[4].integer, a[6].integer, team);
  else
    unpack<float>(a, layout, a[4].integer, a[6].integer, team);
}

// ---- copies ----

// Copies the first `count` tokens of sixteen and zeroes the others. A row of 16 words has one word of each token.
static void copy_keys(const Word* source, Word* target, int64_t count, int64_t words) {
  for (int64_t w = 0; w < words * 16; w++) target[w] = w % 16 < count ? source[w] : 0;
}

static void copy_values(const Word* source, Word* target, int64_t count, int64_t depth, bool paired) {
  int64_t whole = (paired ? count / 2 : count) * depth, all = (paired ? 8 : 16) * depth;
  memcpy(target, source, whole * sizeof(Word));
  if (paired && count % 2)
    for (int64_t i = 0; i < depth; i++, whole++) target[whole] = source[whole] & 0xffff;
  memset(target + whole, 0, (all - whole) * sizeof(Word));
}

// data, pairs int64 (count, 2) of which no target is a source, dtype, num_layers, num_blocks, count, kv_heads,
// block_size, head_dim, num_tokens
void copy_blocks(const Arg* a, const Team& team) {
  auto pairs = (const int64_t*)a[1].data;
  int64_t paired = a[2].integer, count = a[5].integer, num_tokens = a[9].integer, begin, end;
  Layout layout = {a[4].integer, a[6].integer, a[7].integer, a[8].integer};
  int64_t heads = layout.heads, depth = layout.depth(), words = paired ? depth / 2 : depth;  // per token
  part_of(team, a[3].integer * 2 * count * heads, layout.block_size * words, &begin, &end);
  for (int64_t i = begin; i < end; i++) {
    int64_t index = i / heads % count, plane = i / heads / count, scale = paired ? 2 : 1;
    const int64_t* pair = pairs + 2 * index;
    auto source = (const Word*)a[0].data + layout.offset(plane / 2, plane % 2, pair[0], i % heads) / scale;
    auto target = (Word*)a[0].data + layout.offset(plane / 2, plane % 2, pair[1], i % heads) / scale;
    int64_t whole = num_tokens / 16 * 16, rest = num_tokens % 16, at = whole * words;
    memcpy(target, source, at * sizeof(Word));
    if (rest && plane % 2) copy_values(source + at, target + at, rest, depth, paired);
    if (rest && plane % 2 == 0) copy_keys(source + at, target + at, rest, words);
    if (rest) whole += 16;
    memset(target + whole * words, 0, (layout.block_size - whole) * words * sizeof(Word));
  }
}

}  // namespace quire::ISA
