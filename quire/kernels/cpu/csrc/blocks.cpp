// KV blocks: (num_layers, 2, num_blocks, kv_heads, block_size / 16, part); index 0 of the second axis is keys.
//
// A part has sixteen tokens of a head: 16 * depth numbers, and 16 float32 scales of 8-bit types. depth is head_dim padded
// by zeros to a multiple of 16. Keys are transposed, so that 16 scores are one vector: float32 [depth][16 tokens], bf16
// [depth / 2][16 tokens][2], 8 bits [depth / 4][16 tokens][4]. Values are float32 [16 tokens][depth], bf16
// [8 pairs of tokens][depth][2], 8 bits [4 times 4 tokens][depth][4]. In words of 4 bytes, keys are [words][16 tokens] for all
// types, and the scales are the last 16 words. Keys of int8 are stored as key + 128 in order; see terms.h for the order of
// other groups of four bytes.
//
// int4: a head is rotated, and has units of 32 codes (see quantized.py). Keys are the words of the canonical layout,
// [words][16 tokens]. Values have the same bits for four tokens in a word. The lower bits are [units][4 times 4 tokens]
// [16 numbers][4], with those of number n + 16 above those of number n. The upper bits are [units][16 numbers] words. There
// the bits of numbers n and n + 16 of token 4 * i + j are bits 2 * i and 2 * i + 1 of the byte of token j.
#include "int4.h"
#include "rows.h"

namespace quire::ISA {

typedef uint32_t __attribute__((may_alias)) Word;
typedef uint32_t Quad __attribute__((vector_size(16)));

template <class K>
constexpr bool IS_INT4 = false;
template <>
constexpr bool IS_INT4<Int4> = true;

namespace {
// Of blocks of K. Sizes are in numbers of this type.
template <class K>
struct Layout {
  int64_t num_blocks, heads, block_size, dim;

  int64_t units() const { return (dim + INT4_UNIT - 1) / INT4_UNIT; }  // of int4
  int64_t depth() const { return IS_INT4<K> ? units() * INT4_BYTES : up_to(dim, 16); }
  int64_t scales() const { return HAS_SCALES<K> ? 4 : 0; }
  int64_t row() const { return depth() + scales(); }                                // of a token
  int64_t canonical_row() const { return (IS_INT4<K> ? depth() : dim) + scales(); }  // in the canonical layout
  int64_t part() const { return 16 * row(); }
  int64_t words() const { return row() * sizeof(K) / sizeof(Word); }  // of a token
  // the keys, or values, of a head in a block of a layer
  int64_t offset(int64_t layer, int64_t is_value, int64_t block, int64_t head) const {
    return (((layer * 2 + is_value) * num_blocks + block) * heads + head) * (block_size / 16) * part();
  }
};
}  // namespace

// ---- codes ----

template <class K>
constexpr float LARGEST = 127.0f;
template <class X>
constexpr float LARGEST<Fp8<X>> = 448.0f;

// Codes of numbers of at most LARGEST; ties to even.
INLINE IVec codes_of(Vec v, int8_t) { return to_ints(round_to_int(v)); }
INLINE IVec codes_of(Vec v, Fp8<float>) {
  UVec bits = (UVec)v, sign = bits >> 24 & 0x80u, rest = bits & 0x7fffffffu;
  UVec normal = ((rest + 0x7ffffu + (rest >> 20 & 1u)) >> 20) - (120u << 3);
  UVec subnormal = (UVec)((Vec)rest + 16384.0f) - as_bits(16384.0f);  // the sum is rounded to units of 2^-9
  IVec is_normal = (Vec)rest >= 0x1p-6f;
  return (IVec)(((normal & (UVec)is_normal) | (subnormal & ~(UVec)is_normal)) | sign);
}

// Rounds a head to codes and a scale, with which the largest magnitude is LARGEST. The scale is NaN if a number is not
// finite.
template <class T, class K>
static void round_head(const T* x, const Layout<K>& layout, K* row) {
  Vec most{}, bad{}, limit = splat(LARGEST<K>);
  each_vector(layout.dim, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    Vec v = load_some(x + i, n);
    most = vmax(most, vmax(v, -v));
    bad = fma(v, Vec{}, bad);
  });
  float none = sum(bad), scale = largest(most) / LARGEST<K>;
  memset(row, 0, layout.depth());
  if (none == none && scale > 0)
    each_vector(layout.dim, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
      Vec v = load_some(x + i, n) / splat(scale);
      store_bytes(row + i, codes_of(vmax(-limit, vmin(limit, v)), K{}));
    });
  if (none != none) scale = none;
  memcpy(row + layout.depth(), &scale, sizeof scale);
}

// Rotates a head and rounds it to codes of 5 bits. The scale is NaN if a rotated number is not finite.
template <class T>
static void round_head(const T* x, const Layout<Int4>& layout, Int4* row) {
  alignas(64) float rotated[MAX_HEAD_DIM];
  int64_t size = layout.units() * INT4_UNIT;
  hadamard_of(x, layout.dim, size, rotated);
  Vec most{}, least{}, bad{};
  for (int64_t i = 0; i < size; i += LANES) {
    Vec v = load(rotated + i);
    most = vmax(most, v);
    least = vmax(least, -v);
    bad = fma(v, Vec{}, bad);
  }
  float none = sum(bad), high = largest(most), low = largest(least);
  bool up = high > low;
  float scale = up ? maxf(high / 16.0f, low / 15.5f) : maxf(low / 16.0f, high / 15.5f);
  float step = scale > 0 ? scale : 1.0f, zero = up ? 15.0f : 16.0f;
  if (up) scale = -scale;
  if (none != none) {
    memset(row, 0, layout.depth());
    scale = as_float(0x7fc00000);
  } else {
    for (int64_t unit = 0; unit < layout.units(); unit++) {
      IVec codes[2];
      for (int i = 0; i < 2; i++) {
        Vec steps = round_to_int(load(rotated + unit * INT4_UNIT + i * LANES) / splat(step)) + splat(zero);
        codes[i] = to_ints(vmin(splat(31.0f), vmax(Vec{}, steps)));
      }
      store_bytes(row + unit * LANES, (codes[0] & 15) | (codes[1] & 15) << 4);
      UVec upper = ((UVec)(codes[0] >> 4) | (UVec)(codes[1] >> 4) << 4) << places_of_upper_bits();
      alignas(64) Word words[LANES];
      Word all = 0;
      store_bits(words, upper);
      for (Word word : words) all |= word;
      memcpy(row + (layout.units() * 4 + unit) * sizeof(Word), &all, sizeof(Word));
    }
  }
  memcpy(row + layout.depth(), &scale, sizeof scale);
}

// A head in the canonical layout.
template <class K>
INLINE void round_head(const K* canonical, const Layout<K>& layout, K* row) {
  int64_t bytes = layout.canonical_row() - layout.scales();
  memcpy((void*)row, canonical, bytes);
  memset((void*)(row + bytes), 0, layout.depth() - bytes);
  memcpy((void*)(row + layout.depth()), canonical + bytes, layout.scales());
}
INLINE void round_head(const Int4* canonical, const Layout<Int4>& layout, Int4* row) {
  memcpy(row, canonical, layout.row());
}

// Words of a key from codes to the stored form, or back: adds 128, or exchanges the inner two bytes.
INLINE void exchange(Word* words, int64_t count, int8_t) {
  for (int64_t i = 0; i < count; i++) words[i] ^= 0x80808080u;
}
INLINE void exchange(Word*, int64_t, Int4) {}
INLINE void exchange(Word* words, int64_t count, Fp8<float>) {
  for (int64_t i = 0; i < count; i++)
    words[i] = (words[i] & 0xff0000ffu) | (words[i] & 0xff00u) << 8 | (words[i] >> 8 & 0xff00u);
}
constexpr int64_t INNER_SWAPPED[] = {0, 2, 1, 3};

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
    int64_t w = 0;
    for (; w + 4 <= words; w += 4) {
      Quad quads[4];
      for (int i = 0; i < 4; i++) quads[i] = load_quad(row + i * words + w);
      transpose(quads);
      for (int i = 0; i < 4; i++) memcpy(out + (w + i) * 16, &quads[i], 16);
    }
    for (; w < words; w++)
      for (int i = 0; i < 4; i++) out[w * 16 + i] = row[i * words + w];
    t += 4;
  }
}

// Reads all sixteen keys as rows of `words`.
static void get_keys(const Word* sixteen, Word* rows, int64_t words) {
  for (int64_t t = 0; t < 16; t += 4) {
    int64_t w = 0;
    for (; w + 4 <= words; w += 4) {
      Quad quads[4];
      for (int i = 0; i < 4; i++) quads[i] = load_quad(sixteen + (w + i) * 16 + t);
      transpose(quads);
      for (int i = 0; i < 4; i++) memcpy(rows + (t + i) * words + w, &quads[i], 16);
    }
    for (; w < words; w++)
      for (int i = 0; i < 4; i++) rows[(t + i) * words + w] = sixteen[w * 16 + t + i];
  }
}

// ---- values ----

// Writes the values of `count` tokens, `stride` elements apart, to tokens [place, place + count) of sixteen.
template <class T>
static void put_values(const T* v, int64_t stride, float* sixteen, int64_t place, int64_t count,
                       const Layout<float>& layout) {
  int64_t dim = layout.dim, depth = layout.depth();
  for (int64_t t = 0; t < count; t++)
    for (int64_t i = 0; i < depth; i += LANES)
      store(sixteen + (place + t) * depth + i, load_some(v + t * stride + i, min(LANES, dim - i)));
}

template <class T>
static void put_values(const T* v, int64_t stride, bf16* sixteen, int64_t place, int64_t count,
                       const Layout<bf16>& layout) {
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

// The same for rows of codes and a scale.
template <class K>
static void put_values(const K* rows, K* sixteen, int64_t place, int64_t count, const Layout<K>& layout) {
  int64_t depth = layout.depth();
  for (int64_t t = 0; t < count; t++) {
    const K* row = rows + t * layout.row();
    K* out = sixteen + (place + t) / 4 * 4 * depth + INNER_SWAPPED[(place + t) % 4];
    for (int64_t i = 0; i < depth; i++) out[4 * i] = row[i];
    memcpy(sixteen + 16 * depth + (place + t) * layout.scales(), row + depth, layout.scales());
  }
}
// Writes bits [shift, shift + bits) of 16 words.
INLINE void put_bits(Word* words, UVec numbers, int64_t bits, int64_t shift) {
  UVec others = load_bits<UVec>(words) & ~(((1u << bits) - 1u) << shift);
  store_bits(words, others | numbers << (uint32_t)shift);
}
static void put_values(const Int4* rows, Int4* sixteen, int64_t place, int64_t count, const Layout<Int4>& layout) {
  int64_t units = layout.units();
  auto lower = (Word*)sixteen, upper = lower + units * 64;
  for (int64_t t = place; t < place + count; t++, rows += layout.row()) {
    int64_t four = t / 4, shift = 8 * INNER_SWAPPED[t % 4];
    for (int64_t unit = 0; unit < units; unit++) {
      put_bits(lower + (unit * 4 + four) * LANES, (UVec)load_bytes(rows + unit * LANES), 8, shift);
      UVec bits = (UVec)splat_int((int32_t)((const Word*)rows)[units * 4 + unit]) >> places_of_upper_bits();
      put_bits(upper + unit * LANES, (bits & 1u) | (bits >> 3u & 2u), 2, shift + 2 * four);
    }
    memcpy(sixteen + 16 * layout.depth() + t * layout.scales(), rows + layout.depth(), layout.scales());
  }
}
INLINE void get_value(const Int4* sixteen, int64_t place, Int4* out, const Layout<Int4>& layout) {
  int64_t units = layout.units(), four = place / 4, shift = 8 * INNER_SWAPPED[place % 4];
  auto lower = (const Word*)sixteen, upper = lower + units * 64;
  for (int64_t unit = 0; unit < units; unit++) {
    store_bytes(out + unit * LANES, (IVec)(load_bits<UVec>(lower + (unit * 4 + four) * LANES) >> (uint32_t)shift));
    Word all = 0;
    for (int64_t i = 0; i < LANES; i++) {
      Word bits = upper[unit * LANES + i] >> (shift + 2 * four), at = 8 * (i % 4) + i / 4;
      all |= (bits & 1) << at | (bits >> 1 & 1) << (at + 4);
    }
    memcpy(out + (units * 4 + unit) * sizeof(Word), &all, sizeof(Word));
  }
  memcpy(out + layout.depth(), sixteen + 16 * layout.depth() + place * layout.scales(), layout.scales());
}

INLINE void get_value(const float* sixteen, int64_t place, float* out, const Layout<float>& layout) {
  memcpy(out, sixteen + place * layout.depth(), layout.dim * sizeof(float));
}
template <class K>
INLINE void get_value(const K* sixteen, int64_t place, K* out, const Layout<K>& layout) {
  const K* row = sixteen + place / 4 * 4 * layout.depth() + INNER_SWAPPED[place % 4];
  for (int64_t i = 0; i < layout.dim; i++) out[i] = row[4 * i];
  memcpy((void*)(out + layout.dim), sixteen + 16 * layout.depth() + place * layout.scales(), layout.scales());
}
INLINE void get_value(const bf16* sixteen, int64_t place, bf16* out, const Layout<bf16>& layout) {
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

template <class K>
struct Scratch {
  K* rows;         // [16][row]
  float* rotated;  // [dim], padded, for types with scales
};
}  // namespace

// Writes the key of a token, rotated, as a row of words in the stored order.
template <class T, class K>
INLINE void make_key(const Tokens<T>& in, int64_t t, const Layout<K>& layout, const Scratch<K>& scratch) {
  const T* k = in.k + t * in.k_stride;
  const float *cos = in.cos + t * in.half, *sin = in.sin + t * in.half;
  K* row = scratch.rows + t * layout.row();
  if constexpr (!HAS_SCALES<K>) {
    rotate(k, row, cos, sin, in.half, layout.dim);
  } else {
    if constexpr (HAS_SCALES<T>) {
      round_head(k, layout, row);
    } else {
      rotate(k, scratch.rotated, cos, sin, in.half, layout.dim);
      round_head(scratch.rotated, layout, row);
    }
    exchange((Word*)row, layout.depth() / sizeof(Word), K{});
  }
}

// Stores `count` tokens from slot `place` of a block on. If `place` is 0, the slots after them are zeroed.
template <class T, class K>
static void store_tokens(Tokens<T> in, K* keys, K* values, int64_t place, int64_t count, const Layout<K>& layout,
                         const Scratch<K>& scratch) {
  if (place == 0) {
    int64_t filled = count / 16 * layout.part(), all = layout.block_size / 16 * layout.part();
    memset((void*)(keys + filled), 0, (all - filled) * sizeof(K));
    memset((void*)(values + filled), 0, (all - filled) * sizeof(K));
  }
  while (count > 0) {
    int64_t first = place % 16, some = min(count, 16 - first), offset = place / 16 * layout.part();
    for (int64_t t = 0; t < some; t++) make_key(in, t, layout, scratch);
    put_keys((const Word*)scratch.rows, (Word*)(keys + offset), first, some, layout.words());
    if constexpr (HAS_SCALES<K>) {
      for (int64_t t = 0; t < some; t++) round_head(in.v + t * in.v_stride, layout, scratch.rows + t * layout.row());
      put_values(scratch.rows, values + offset, first, some, layout);
    } else {
      put_values(in.v, in.v_stride, values + offset, first, some, layout);
    }
    in.k += some * in.k_stride;
    in.v += some * in.v_stride;
    in.cos += some * in.half;
    in.sin += some * in.half;
    place += some;
    count -= some;
  }
}

// Zeroed scratch.
template <class K>
static Scratch<K> zero_scratch(const Layout<K>& layout, const Team& team) {
  size_t rows = layout.part() * sizeof(K), rotated = up_to(layout.dim, 16) * sizeof(float);
  auto memory = (char*)memset(team.scratch(rows + rotated), 0, rows + rotated);
  return {(K*)memory, (float*)(memory + rows)};
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
static void store_step(const Tokens<T>& all, const Slots& slots, K* data, int64_t layer, const Layout<K>& layout,
                       const Team& team) {
  int64_t heads = layout.heads, dim = layout.dim, begin, end, counted = -1, count = 0;
  part_of(team, slots.num_tokens * heads, 16 * dim, &begin, &end);  // 16 *: a key touches one cache line per word
  Scratch<K> scratch = zero_scratch(layout, team);
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
                 slot % layout.block_size, count, layout, scratch);
  }
}

template <class T, class K>
static void rotary_write_to(const Arg* a, const Team& team) {
  int64_t tokens = a[10].integer, heads = a[11].integer, layer = a[19].integer;
  Layout<K> layout = {a[18].integer, a[12].integer, a[17].integer, a[13].integer};
  Tokens<T> all = {(const T*)a[1].data, (const T*)a[2].data, a[15].integer, a[16].integer, (const float*)a[3].data,
                   (const float*)a[4].data, a[3].data ? a[20].integer : 0};
  Slots slots = {(const int64_t*)a[6].data, tokens, layout.block_size};
  auto q = (const T*)a[0].data;
  if (q) rotate_heads(q, a[14].integer, (T*)a[5].data, all.cos, all.sin, all.half, tokens, heads, layout.dim, team);
  store_step(all, slots, (K*)a[7].data, layer, layout, team);
}

template <class T>
static void rotate_of(const Arg* a, const Team& team) {
  rotate_heads((const T*)a[0].data, a[8].integer, (T*)a[3].data, (const float*)a[1].data, (const float*)a[2].data,
               a[9].integer, a[5].integer, a[6].integer, a[7].integer, team);
}

// x, cos, sin, out (contiguous), dtype, num_tokens, heads, head_dim, token stride of x, rotary_dim / 2
void rotate(const Arg* a, const Team& team) {
  return a[4].integer ? rotate_of<bf16>(a, team) : rotate_of<float>(a, team);
}

template <class T>
static void rotary_write_of(const Arg* a, const Team& team) {
  switch ((Stored)a[9].integer) {
    case Stored::float32:
      return rotary_write_to<T, float>(a, team);
    case Stored::bfloat16:
      return rotary_write_to<T, bf16>(a, team);
    case Stored::int8:
      return rotary_write_to<T, int8_t>(a, team);
    case Stored::fp8:
      return rotary_write_to<T, Fp8<float>>(a, team);
    case Stored::int4:
      return rotary_write_to<T, Int4>(a, team);
  }
}

// q or None, k, v, cos or None, sin, q_out, slots int64 (num_tokens,), blocks, dtype, Stored, num_tokens, heads,
// kv_heads, head_dim, token strides of q, k, v, block_size, num_blocks, layer, rotary_dim / 2
// Rotates q into q_out, which is contiguous, and stores rotated k, and v. A slot is block * block_size + offset; tokens
// whose slots are outside of the blocks are not stored. The tokens of one block must be consecutive.
void rotary_write(const Arg* a, const Team& team) {
  if (a[8].integer)
    rotary_write_of<bf16>(a, team);
  else
    rotary_write_of<float>(a, team);
}

// ---- the canonical layout: (num_layers, 2, count, block_size, kv_heads, canonical row) ----

template <class K>
static void pack(const Arg* a, const Layout<K>& layout, int64_t layers, int64_t count, const Team& team) {
  auto blocks = (const int64_t*)a[1].data;
  int64_t heads = layout.heads, dim = layout.canonical_row(), begin, end;
  part_of(team, layers * 2 * count * heads, layout.block_size * dim, &begin, &end);
  K* rows = (K*)team.scratch(layout.part() * sizeof(K));
  for (int64_t i = begin; i < end; i++) {
    int64_t head = i % heads, index = i / heads, plane = index / count;
    const K* in = (const K*)a[0].data + layout.offset(plane / 2, plane % 2, blocks[index % count], head);
    K* out = (K*)a[2].data + (index * layout.block_size * heads + head) * dim;
    for (int64_t place = 0; place < layout.block_size; place++, out += heads * dim) {
      const K* sixteen = in + place / 16 * layout.part();
      if (plane % 2) {
        get_value(sixteen, place % 16, out, layout);
        continue;
      }
      K* row = rows + place % 16 * layout.row();
      if (place % 16 == 0) get_keys((const Word*)sixteen, (Word*)rows, layout.words());
      if constexpr (HAS_SCALES<K> && !IS_INT4<K>) {
        exchange((Word*)row, layout.depth() / sizeof(Word), K{});
        float scale;
        memcpy(&scale, row + layout.depth(), sizeof scale);
        if (scale == 0) memset(row, 0, layout.depth());  // zeroed memory is not the stored form of zeros
      }
      int64_t numbers = layout.canonical_row() - layout.scales();
      memcpy((void*)out, row, numbers * sizeof(K));
      memcpy((void*)(out + numbers), row + layout.depth(), layout.scales());
    }
  }
}

template <class K>
static void unpack(const Arg* a, const Layout<K>& layout, int64_t layers, int64_t count, const Team& team) {
  auto blocks = (const int64_t*)a[1].data;
  int64_t heads = layout.heads, dim = layout.canonical_row(), stride = heads * dim, begin, end;
  part_of(team, layers * count * heads, 2 * layout.block_size * dim, &begin, &end);
  Scratch<K> scratch = zero_scratch(layout, team);
  for (int64_t i = begin; i < end; i++) {
    int64_t head = i % heads, index = i / heads % count, layer = i / heads / count, block = blocks[index];
    const K* k = (const K*)a[2].data + (layer * 2 * count + index) * layout.block_size * stride + head * dim;
    Tokens<K> in = {k, k + count * layout.block_size * stride, stride, stride, nullptr, nullptr, 0};
    K* data = (K*)a[0].data;
    store_tokens(in, data + layout.offset(layer, 0, block, head), data + layout.offset(layer, 1, block, head), 0,
                 layout.block_size, layout, scratch);
  }
}

// Calls run(layout) with the Layout of K for a Stored, for kernels that move numbers as they are.
template <class Run>
INLINE void with_layout(const Arg& stored, int64_t num_blocks, int64_t heads, int64_t block_size, int64_t dim, Run run) {
  switch ((Stored)stored.integer) {
    case Stored::float32:
      return run(Layout<float>{num_blocks, heads, block_size, dim});
    case Stored::bfloat16:
      return run(Layout<bf16>{num_blocks, heads, block_size, dim});
    case Stored::int8:
      return run(Layout<int8_t>{num_blocks, heads, block_size, dim});
    case Stored::fp8:
      return run(Layout<Fp8<float>>{num_blocks, heads, block_size, dim});
    case Stored::int4:
      return run(Layout<Int4>{num_blocks, heads, block_size, dim});
  }
}

// data, blocks int64 (count,), canonical, Stored, num_layers, num_blocks, count, kv_heads, block_size, head_dim
void pack_blocks(const Arg* a, const Team& team) {
  with_layout(a[3], a[5].integer, a[7].integer, a[8].integer, a[9].integer,
              [&](auto layout) { pack(a, layout, a[4].integer, a[6].integer, team); });
}

// The inverse of pack_blocks, with the same arguments.
void unpack_blocks(const Arg* a, const Team& team) {
  with_layout(a[3], a[5].integer, a[7].integer, a[8].integer, a[9].integer,
              [&](auto layout) { unpack(a, layout, a[4].integer, a[6].integer, team); });
}

// ---- copies ----

// Copies the first `count` tokens of sixteen and zeroes the others. A row of 16 words has one word of each token.
static void copy_keys(const Word* source, Word* target, int64_t count, int64_t words) {
  for (int64_t w = 0; w < words * 16; w++) target[w] = w % 16 < count ? source[w] : 0;
}

// The bytes of the first tokens of four.
constexpr Word FIRST_BYTES[] = {0, 0xffu, 0x00ff00ffu, 0x00ffffffu, 0xffffffffu};

template <class K>
static void copy_values(const Word* source, Word* target, int64_t count, const Layout<K>& layout) {
  constexpr int64_t together = sizeof(Word) / sizeof(K);  // tokens whose numbers are in one word
  Word mask = sizeof(K) == 1 ? FIRST_BYTES[count % together] : 0xffffu;
  int64_t depth = layout.depth(), whole = count / together * depth, all = 16 / together * depth;
  memcpy(target, source, whole * sizeof(Word));
  if (count % together)
    for (int64_t i = 0; i < depth; i++, whole++) target[whole] = source[whole] & mask;
  memset(target + whole, 0, (all - whole) * sizeof(Word));
  if (HAS_SCALES<K>) copy_keys(source + all, target + all, count, 1);
}
static void copy_values(const Word* source, Word* target, int64_t count, const Layout<Int4>& layout) {
  int64_t lower = layout.units() * 64, all = layout.depth() * 4;
  Word masks[4], upper = 0;
  for (int64_t four = 0; four < 4; four++) {
    masks[four] = FIRST_BYTES[max(0, min(4, count - 4 * four))];
    upper |= (masks[four] & 0x03030303u) << (2 * four);
  }
  for (int64_t i = 0; i < all; i++) target[i] = source[i] & (i < lower ? masks[i / LANES % 4] : upper);
  copy_keys(source + all, target + all, count, 1);
}

template <class K>
static void copy(const Arg* a, const Layout<K>& layout, const Team& team) {
  auto pairs = (const int64_t*)a[1].data;
  int64_t count = a[5].integer, num_tokens = a[9].integer, heads = layout.heads, part = layout.part(), begin, end;
  part_of(team, a[3].integer * 2 * count * heads, layout.block_size * layout.words(), &begin, &end);
  for (int64_t i = begin; i < end; i++) {
    int64_t index = i / heads % count, plane = i / heads / count;
    const int64_t* pair = pairs + 2 * index;
    const K* source = (const K*)a[0].data + layout.offset(plane / 2, plane % 2, pair[0], i % heads);
    K* target = (K*)a[0].data + layout.offset(plane / 2, plane % 2, pair[1], i % heads);
    int64_t whole = num_tokens / 16, rest = num_tokens % 16;
    auto from = (const Word*)(source + whole * part);
    auto to = (Word*)(target + whole * part);
    memcpy((void*)target, source, whole * part * sizeof(K));
    if (rest && plane % 2) copy_values(from, to, rest, layout);
    if (rest && plane % 2 == 0) copy_keys(from, to, rest, layout.words());
    if (rest) whole++;
    memset((void*)(target + whole * part), 0, (layout.block_size / 16 - whole) * part * sizeof(K));
  }
}

// data, pairs int64 (count, 2) of which no target is a source, Stored, num_layers, num_blocks, count, kv_heads, block_size,
// head_dim, num_tokens
void copy_blocks(const Arg* a, const Team& team) {
  with_layout(a[2], a[4].integer, a[6].integer, a[7].integer, a[8].integer,
              [&](auto layout) { copy(a, layout, team); });
}

}  // namespace quire::ISA
