// Recurrent states: short convolutions, the gated delta rule and Mamba-2, token by token. `reference.states` specifies them.
//
// The columns of a head's state are independent of each other, given queries, keys and gates. So the columns are divided
// into pieces that stay in the L1 cache while all tokens of a block are applied. With the state S before a token, its decay d
// and the vector u that is added, S' = d S + k u^T, and the output is S'^T q = d S^T q + (k . q) u. So one pass over the state
// applies a token and computes the products S^T k and S^T q of the next one.
//
// Each token takes the same operations in the same order, whichever chunk or block of tokens it is in. So its bits depend
// neither on chunks, nor on threads, nor on other sequences.
#include "rows.h"

namespace quire::ISA {

namespace {
constexpr int64_t TOKENS = 32;  // that are convolved at once
constexpr int MOST_VECTORS = REGISTER_BYTES == 64 ? 4 : REGISTER_BYTES == 32 ? 2 : 1;  // columns of a piece, in vectors
constexpr int64_t MOST_PIECES = 8;   // of an item; they stay in the L2 cache
constexpr int64_t SLICE = 512;  // numbers of inputs that are one unit of work
constexpr float NORM_EPS = 1e-6f;

enum class Rule { delta, mamba2, convolution };

struct Chunk {
  int64_t start, stop, block, settled, settles;
  int64_t token;  // of position `start`, among those of the step
};
struct Snapshot {
  int64_t chunk, position, block;
};

// A layer's inputs and outputs of type T, and its state blocks of type S.
template <class S, class T>
struct Layer {
  Rule rule;
  int64_t key_heads, value_heads, key_dim, value_dim, conv_width, num_inputs;
  const T* inputs;
  int64_t stride;  // numbers from token to token of the inputs
  T* out;
  S* data;
  int64_t num_blocks, block_numbers;  // block_numbers: from block to block
  const Chunk* chunks;
  int64_t num_chunks;
  const Snapshot* snapshots;
  int64_t num_snapshots;
  const void *conv_weight, *conv_bias;
  bool has_short_weights;  // whether they are bf16
  const float *decay, *time_bias, *skip;
  float least_time, most_time;

  int64_t num_keys() const { return key_heads * key_dim; }
  int64_t num_values() const { return value_heads * value_dim; }
  int64_t num_channels() const { return 2 * num_keys() + num_values(); }
  int64_t width() const { return num_channels() + (rule == Rule::delta ? 2 : rule == Rule::mamba2 ? 1 : 0) * value_heads; }
  int64_t vectors() const { return up_to(value_dim, LANES) / LANES; }                 // of a row of a state
  int64_t pieces() const { return (vectors() + MOST_VECTORS - 1) / MOST_VECTORS; }   // of a head
  int64_t piece_vectors() const { return (vectors() + pieces() - 1) / pieces(); }

  bool is_computed(const Chunk& c) const { return c.start < c.stop && c.block >= 0 && c.block < num_blocks; }
  S* state(int64_t block) const { return data + block * block_numbers; }
  S* inputs_of(int64_t block) const { return state(block) + num_values() * key_dim; }

  // The inputs [number, number + n) of a position from `settled - conv_width + 1` on.
  INLINE_MEMBER Vec input(const Chunk& c, int64_t position, int64_t number, int64_t n) const {
    if (position >= c.start) return load_some(inputs + (c.token + position - c.start) * stride + number, n);
    if (c.start == 0) return Vec{};
    return load_some(inputs_of(c.block) + (position - c.settled + conv_width - 1) * width() + number, n);
  }

  template <class W>
  void read_taps(int64_t channel, int64_t n, float* taps) const {
    auto weight = (const W*)conv_weight + channel * conv_width;
    auto bias = (const W*)conv_bias;
    memset(taps, 0, (conv_width + 1) * LANES * sizeof(float));
    for (int64_t i = 0; i < n; i++)
      for (int64_t w = 0; w < conv_width; w++) taps[w * LANES + i] = to_float(weight[i * conv_width + w]);
    if (bias) store(taps + conv_width * LANES, load_some(bias + channel, n));
  }
  // Writes the weights of n channels, at most 16: those of the oldest token first, then biases.
  void read_taps(int64_t channel, int64_t n, float* taps) const {
    has_short_weights ? read_taps<bf16>(channel, n, taps) : read_taps<float>(channel, n, taps);
  }

  // Calls write(j, x) with the convolved numbers of n channels, at most 16, for tokens position + j. window: memory of
  // (count + conv_width - 1) vectors.
  template <class F>
  INLINE_MEMBER void convolve(const Chunk& c, int64_t position, int64_t count, int64_t channel, int64_t n, const float* taps,
                              float* window, F write) const {
    for (int64_t j = 0; j < count + conv_width - 1; j++)
      store(window + j * LANES, input(c, position + j - conv_width + 1, channel, n));
    for (int64_t j = 0; j < count; j++) {
      Vec x = load((const float*)taps + conv_width * LANES);
      for (int64_t w = 0; w < conv_width; w++)
        x = fma(load((const float*)window + (j + w) * LANES), load(taps + w * LANES), x);
      write(j, x);
    }
  }
};

// What a thread needs for an item: `pieces` pieces of value heads that share a key head.
struct Memory {
  int64_t keys, columns;  // numbers of a row of k and of v
  float* states;          // (pieces, key_dim, columns)
  float* taps;            // (vectors of q, k and of the pieces, conv_width + 1, 16)
  float* window;          // (TOKENS + conv_width - 1, 16)
  float *q, *k;           // (TOKENS, keys)
  float* v;               // (TOKENS, columns), then the outputs
  float *products, *decays, *factors;  // (TOKENS,): k . q, decay of the state, and beta or time step
  size_t bytes;

  template <class S, class T>
  Memory(const Layer<S, T>& layer, int64_t pieces, char* begin) {
    keys = up_to(layer.key_dim, LANES), columns = layer.piece_vectors() * LANES;
    char* next = begin;
    auto floats = [&](int64_t count) {
      auto some = (float*)next;
      next += up_to(count * sizeof(float), 64);
      return some;
    };
    states = floats(pieces * layer.key_dim * columns);
    taps = floats((2 * keys + pieces * columns) * (layer.conv_width + 1));
    window = floats((TOKENS + layer.conv_width - 1) * LANES);
    q = floats(TOKENS * keys), k = floats(TOKENS * keys), v = floats(TOKENS * columns);
    products = floats(TOKENS), decays = floats(TOKENS), factors = floats(TOKENS);
    bytes = next - begin;
  }
};

// ---- the recurrence ----

// A token that is not applied yet: S = decay S + k added^T.
template <int N>
struct Token {
  const float* k;
  Vec decay, added[N];
};

// Applies a token to the state (rows, 16 N), if `applies`, then adds S^T k and S^T q to of_k and of_q, if k and q are needed.
template <int N, bool applies, bool reads_k, bool reads_q>
INLINE void pass(float* state, int64_t rows, const Token<N>& token, const float* k, const float* q, Vec (&of_k)[N],
                 Vec (&of_q)[N]) {
  for (int64_t i = 0; i < rows; i++, state += N * LANES)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) {
      Vec s = load((const float*)state + n * LANES);
      if (applies) {
        s = fma(splat(token.k[i]), token.added[n], s * token.decay);
        store(state + n * LANES, s);
      }
      if (reads_k) of_k[n] = fma(splat(k[i]), s, of_k[n]);
      if (reads_q) of_q[n] = fma(splat(q[i]), s, of_q[n]);
    }
}

// Applies tokens [begin, end) to a piece; the last of them only if `applies_last`. Their values become their outputs.
template <int N, bool corrects>
static void sweep(const Memory& m, float* state, int64_t rows, int64_t begin, int64_t end, bool applies_last, float skip) {
  Token<N> token;
  for (int64_t j = begin; j < end; j++) {
    const float *k = m.k + j * m.keys, *q = m.q + j * m.keys;
    float* v = m.v + j * m.columns;
    Vec of_k[N] = {}, of_q[N] = {};
    if (j > begin)
      pass<N, true, corrects, true>(state, rows, token, k, q, of_k, of_q);
    else
      pass<N, false, corrects, true>(state, rows, token, k, q, of_k, of_q);
    token.k = k, token.decay = splat(m.decays[j]);
    Vec factor = splat(m.factors[j]), product = splat(m.products[j]);
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) {
      Vec value = load((const float*)v + n * LANES);
      token.added[n] = (corrects ? fma(-of_k[n], token.decay, value) : value) * factor;
      Vec y = fma(product, token.added[n], of_q[n] * token.decay);
      store(v + n * LANES, corrects ? y : fma(splat(skip), value, y));
    }
  }
  Vec none[N];
  if (applies_last) pass<N, true, false, false>(state, rows, token, nullptr, nullptr, none, none);
}

template <bool corrects>
static void sweep_by(int64_t vectors, const Memory& m, float* state, int64_t rows, int64_t begin, int64_t end,
                     bool applies_last, float skip) {
  switch (vectors) {
#define WIDTH(n) \
  case n: \
    if constexpr (n <= MOST_VECTORS) sweep<n, corrects>(m, state, rows, begin, end, applies_last, skip); \
    return;
    WIDTH(1) WIDTH(2) WIDTH(3) WIDTH(4)
#undef WIDTH
  }
}

// Consecutive pieces of the value heads that share a key head, in one chunk.
template <class S, class T>
struct Item {
  const Layer<S, T>& layer;
  const Chunk& chunk;
  int64_t index, key_head, first, count;  // index: of the chunk. first: piece among those of the key head
  const Memory& m;

  int64_t head(int64_t piece) const {
    return key_head * (layer.value_heads / layer.key_heads) + (first + piece) / layer.pieces();
  }
  int64_t column(int64_t piece) const { return (first + piece) % layer.pieces() * m.columns; }
  int64_t num_columns(int64_t piece) const { return min(m.columns, layer.value_dim - column(piece)); }
  int64_t num_vectors(int64_t piece) const { return (num_columns(piece) + LANES - 1) / LANES; }
  float* state(int64_t piece) const { return m.states + piece * layer.key_dim * m.columns; }
  float* taps(int64_t vector) const { return m.taps + vector * (layer.conv_width + 1) * LANES; }
  S* stored(int64_t block, int64_t piece) const {
    return layer.state(block) + head(piece) * layer.key_dim * layer.value_dim + column(piece);
  }

  // Calls visit(vector, channel, n, out) for the vectors of q and k, with the place of the first token in `m`.
  template <class F>
  void each_key_vector(F visit) const {
    int64_t vector = 0;
    for (int64_t part = 0; part < 2; part++)
      each_vector(layer.key_dim, [&](int64_t i, int64_t n) {
        visit(vector++, (part * layer.key_heads + key_head) * layer.key_dim + i, n, (part ? m.k : m.q) + i);
      });
  }
  // The same for the values of a piece.
  template <class F>
  void each_value_vector(int64_t piece, F visit) const {
    int64_t vector = (2 * m.keys + piece * m.columns) / LANES;
    int64_t channel = 2 * layer.num_keys() + head(piece) * layer.value_dim + column(piece);
    each_vector(num_columns(piece), [&](int64_t i, int64_t n) { visit(vector++, channel + i, n, m.v + i); });
  }

  void read_taps() const {
    auto read = [&](int64_t vector, int64_t channel, int64_t n, float*) { layer.read_taps(channel, n, taps(vector)); };
    each_key_vector(read);
    for (int64_t piece = 0; piece < count; piece++) each_value_vector(piece, read);
  }

  void convolve(int64_t position, int64_t tokens, int64_t vector, int64_t channel, int64_t n, float* out, int64_t size) const {
    layer.convolve(chunk, position, tokens, channel, n, taps(vector), m.window,
                   [&](int64_t j, Vec x) __attribute__((always_inline)) { store(out + j * size, x * sigmoid(x)); });
  }

  void read_keys(int64_t position, int64_t tokens) const {
    each_key_vector([&](int64_t vector, int64_t channel, int64_t n, float* out) {
      convolve(position, tokens, vector, channel, n, out, m.keys);
    });
    auto dot = [&](const float* x, const float* y) {
      return sum_row(m.keys, [&](Vec sum, int64_t i, int64_t) __attribute__((always_inline)) {
        return fma(load(x + i), load(y + i), sum);
      });
    };
    auto scale = [&](float* x, float factor) {
      for (int64_t i = 0; i < m.keys; i += LANES) store(x + i, load((const float*)x + i) * factor);
    };
    for (int64_t j = 0; j < tokens; j++) {
      float *q = m.q + j * m.keys, *k = m.k + j * m.keys;
      if (layer.rule == Rule::delta) {
        scale(q, 1.0f / __builtin_sqrtf((dot(q, q) + NORM_EPS) * (float)layer.key_dim));
        scale(k, 1.0f / __builtin_sqrtf(dot(k, k) + NORM_EPS));
      }
      m.products[j] = dot(k, q);
    }
  }

  void read_gates(int64_t piece, int64_t position, int64_t tokens) const {
    int64_t of_head = head(piece), number = layer.num_channels() + of_head;
    bool delta = layer.rule == Rule::delta;
    auto read = [&](int64_t place, float* out) {
      for (int64_t j = 0; j < tokens; j++) store_some(out + j, layer.input(chunk, position + j, place, 1), 1);
    };
    read(number, m.factors);
    if (delta) read(number + layer.value_heads, m.decays);
    Vec rate = splat(layer.decay[of_head]), bias = splat(layer.time_bias[of_head]);
    for (int64_t j = 0; j < tokens; j += LANES) {
      Vec first = load((const float*)m.factors + j), time = softplus((delta ? load((const float*)m.decays + j) : first) + bias);
      if (!delta) time = vmin(splat(layer.most_time), vmax(splat(layer.least_time), time));  // NaN stays NaN
      store(m.factors + j, delta ? sigmoid(first) : time);
      store(m.decays + j, exp(rate * time));
    }
  }

  void read_state(int64_t piece) const {
    float* to = state(piece);
    int64_t size = num_vectors(piece) * LANES;
    if (chunk.start == 0) return (void)memset(to, 0, layer.key_dim * size * sizeof(float));
    const S* from = stored(chunk.block, piece);
    for (int64_t row = 0; row < layer.key_dim; row++)
      each_vector(num_columns(piece), [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        store(to + row * size + i, load_some(from + row * layer.value_dim + i, n));
      });
  }

  void write_state(int64_t piece, int64_t block) const {
    const float* from = state(piece);
    int64_t size = num_vectors(piece) * LANES;
    S* to = stored(block, piece);
    for (int64_t row = 0; row < layer.key_dim; row++)
      each_vector(num_columns(piece), [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        store_some(to + row * layer.value_dim + i, load(from + row * size + i), n);
      });
  }

  // Writes the blocks that are to stand behind `position`.
  void write_states(int64_t piece, int64_t position) const {
    if (position == chunk.settles && (position != chunk.settled || chunk.start == 0)) write_state(piece, chunk.block);
    for (int64_t i = 0; i < layer.num_snapshots; i++) {
      const Snapshot& one = layer.snapshots[i];
      if (one.chunk == index && one.position == position) write_state(piece, one.block);
    }
  }

  // The first position behind `position` at which the state is written, or `stop`.
  int64_t next_written(int64_t position, int64_t stop) const {
    if (chunk.settles > position) stop = min(stop, chunk.settles);
    for (int64_t i = 0; i < layer.num_snapshots; i++) {
      const Snapshot& one = layer.snapshots[i];
      if (one.chunk == index && one.position > position) stop = min(stop, one.position);
    }
    return stop;
  }

  void write_outputs(int64_t piece, int64_t position, int64_t tokens) const {
    int64_t number = head(piece) * layer.value_dim + column(piece);
    for (int64_t j = max(0, chunk.start - position); j < tokens; j++) {
      T* out = layer.out + (chunk.token + position + j - chunk.start) * layer.num_values() + number;
      each_vector(num_columns(piece), [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        store_some(out + i, load((const float*)m.v + j * m.columns + i), n);
      });
    }
  }

  void compute_piece(int64_t piece, int64_t position, int64_t tokens) const {
    each_value_vector(piece, [&](int64_t vector, int64_t channel, int64_t n, float* out) {
      convolve(position, tokens, vector, channel, n, out, m.columns);
    });
    read_gates(piece, position, tokens);
    if (position == chunk.settled) {
      read_state(piece);
      write_states(piece, position);
    }
    float skip = layer.skip ? layer.skip[head(piece)] : 0;
    auto sweep_here = layer.rule == Rule::delta ? sweep_by<true> : sweep_by<false>;
    for (int64_t begin = position, stop = position + tokens; begin < stop;) {
      int64_t end = next_written(begin, stop);
      bool is_needed = end < chunk.stop || end == chunk.settles;
      sweep_here(num_vectors(piece), m, state(piece), layer.key_dim, begin - position, end - position, is_needed, skip);
      write_states(piece, end);
      begin = end;
    }
    write_outputs(piece, position, tokens);
  }

  void compute() const {
    read_taps();
    for (int64_t position = chunk.settled; position < chunk.stop; position += TOKENS) {
      int64_t tokens = min(TOKENS, chunk.stop - position);
      read_keys(position, tokens);
      for (int64_t piece = 0; piece < count; piece++) compute_piece(piece, position, tokens);
    }
  }
};

template <class S, class T>
static void recur_heads(const Layer<S, T>& layer, const Team& team) {
  int64_t pieces = layer.value_heads / layer.key_heads * layer.pieces(), computed = 0;
  for (int64_t i = 0; i < layer.num_chunks; i++) computed += layer.is_computed(layer.chunks[i]);
  // items are as large as possible, because each of them convolves queries and keys
  int64_t parts = min(pieces, max((4 * team.size + computed * layer.key_heads - 1) / max(1, computed * layer.key_heads),
                                  (pieces + MOST_PIECES - 1) / MOST_PIECES));
  int64_t per_part = (pieces + parts - 1) / parts, items = layer.num_chunks * layer.key_heads * parts;
  Memory memory(layer, per_part, (char*)team.scratch(Memory(layer, per_part, nullptr).bytes));
  memset(memory.q, 0, (char*)memory.products - (char*)memory.q);  // padding of rows stays 0
  for (int64_t item = team.take(); item < items; item = team.take()) {
    int64_t index = item / parts / layer.key_heads, first = item % parts * per_part;
    const Chunk& chunk = layer.chunks[index];
    if (!layer.is_computed(chunk) || first >= pieces) continue;
    int64_t count = min(per_part, pieces - first);
    Item<S, T>{layer, chunk, index, item / parts % layer.key_heads, first, count, memory}.compute();
  }
}

// "convolution": the convolved numbers are the outputs.
template <class S, class T>
static void recur_channels(const Layer<S, T>& layer, const Team& team) {
  int64_t slices = (layer.num_values() + LANES - 1) / LANES, taps_size = (layer.conv_width + 1) * LANES;
  auto taps = (float*)team.scratch((taps_size + (TOKENS + layer.conv_width - 1) * LANES) * sizeof(float));
  for (int64_t item = team.take(); item < layer.num_chunks * slices; item = team.take()) {
    const Chunk& chunk = layer.chunks[item / slices];
    int64_t channel = item % slices * LANES, n = min(LANES, layer.num_values() - channel);
    if (!layer.is_computed(chunk)) continue;
    layer.read_taps(channel, n, taps);
    for (int64_t position = chunk.start; position < chunk.stop; position += TOKENS) {
      T* out = layer.out + (chunk.token + position - chunk.start) * layer.num_values() + channel;
      layer.convolve(chunk, position, min(TOKENS, chunk.stop - position), channel, n, taps, taps + taps_size,
                     [&](int64_t j, Vec x) __attribute__((always_inline)) { store_some(out + j * layer.num_values(), x, n); });
    }
  }
}

// ---- inputs of blocks ----

// Writes the inputs [begin, end) of the positions of a block that is to stand behind `position`. Rows that are moved within
// the chunk's own block are read before they are overwritten.
template <class S, class T>
static void write_inputs(const Layer<S, T>& layer, const Chunk& chunk, int64_t block, int64_t position, int64_t begin,
                         int64_t end) {
  int64_t tail = layer.conv_width - 1, row = 0, rows = min(layer.num_inputs, chunk.stop - position + tail);
  bool stays = block == chunk.block && position == chunk.settled && chunk.start > 0;
  if (stays) row = chunk.start - position + tail;
  for (; row < rows; row++) {
    S* to = layer.inputs_of(block) + row * layer.width() + begin;
    each_vector(end - begin, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
      store_some(to + i, layer.input(chunk, position - tail + row, begin + i, n), n);
    });
  }
}

template <class S, class T>
static void write_all_inputs(const Layer<S, T>& layer, const Team& team) {
  int64_t slices = (layer.width() + SLICE - 1) / SLICE;
  for (int64_t item = team.take(); item < layer.num_chunks * slices; item = team.take()) {
    int64_t index = item / slices, begin = item % slices * SLICE, end = min(layer.width(), begin + SLICE);
    const Chunk& chunk = layer.chunks[index];
    if (!layer.is_computed(chunk)) continue;
    for (int64_t i = 0; i < layer.num_snapshots; i++)
      if (layer.snapshots[i].chunk == index)
        write_inputs(layer, chunk, layer.snapshots[i].block, layer.snapshots[i].position, begin, end);
    write_inputs(layer, chunk, chunk.block, chunk.settles, begin, end);
  }
}

template <class S, class T>
static void recur_as(const Arg* a, const Team& team) {
  Layer<S, T> layer;
  layer.inputs = (const T*)a[0].data, layer.out = (T*)a[1].data, layer.data = (S*)a[2].data;
  layer.chunks = (const Chunk*)a[3].data, layer.snapshots = (const Snapshot*)a[4].data;
  layer.conv_weight = a[5].data, layer.conv_bias = a[6].data;
  layer.decay = (const float*)a[7].data, layer.time_bias = (const float*)a[8].data, layer.skip = (const float*)a[9].data;
  layer.has_short_weights = a[12].integer, layer.rule = (Rule)a[13].integer;
  layer.num_chunks = a[14].integer, layer.num_snapshots = a[15].integer, layer.stride = a[16].integer;
  layer.key_heads = a[17].integer, layer.value_heads = a[18].integer;
  layer.key_dim = a[19].integer, layer.value_dim = a[20].integer;
  layer.conv_width = a[21].integer, layer.num_inputs = a[22].integer, layer.num_blocks = a[23].integer;
  int64_t numbers = layer.num_values() * layer.key_dim + layer.num_inputs * layer.width();
  layer.data += a[24].integer * numbers, layer.block_numbers = a[25].integer * numbers;
  layer.least_time = (float)a[26].number, layer.most_time = (float)a[27].number;
  if (layer.rule == Rule::convolution)
    recur_channels(layer, team);
  else
    recur_heads(layer, team);
  team.barrier();  // all threads have read the inputs of the blocks
  write_all_inputs(layer, team);
}
}  // namespace

// inputs, out, data (blocks, layers, numbers), chunks int64 (num_chunks, 6) and snapshots int64 (num_snapshots, 3): see Chunk
// and Snapshot; conv_weight, conv_bias or None; decay, time_bias, skip float32 or None; dtypes of inputs, of data and of
// conv_weight, rule, num_chunks, num_snapshots, elements from row to row of inputs, key heads, value heads, key_dim, value_dim,
// conv_width, tokens whose inputs a block has, blocks, layer, layers, least and most time step
void recur(const Arg* a, const Team& team) {
  if (a[11].integer)
    a[10].integer ? recur_as<bf16, bf16>(a, team) : recur_as<bf16, float>(a, team);
  else
    a[10].integer ? recur_as<float, bf16>(a, team) : recur_as<float, float>(a, team);
}

}  // namespace quire::ISA
