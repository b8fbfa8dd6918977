// Recurrent states: short convolutions, gated delta rules and Mamba-2, token by token. `reference.states` specifies them.
//
// The columns of a head's state are independent of each other, given queries, keys and gates. So the columns are divided
// into pieces that stay in the L1 cache while all tokens of a block are applied. With the state S before a token, its decay d
// and the vector u that is added, S' = d S + k u^T, and the output is S'^T q = d S^T q + (k . q) u. So one pass over the state
// applies a token and computes the products S^T k and S^T q of the next one. With decays D of single rows of a state, the
// products are with D k and D q.
//
// Each token takes the same operations in the same order, whichever chunk or block of tokens it is in. So its bits depend
// neither on chunks, nor on threads, nor on other sequences.
#include "rows.h"

namespace quire::ISA {

namespace {
constexpr int64_t TOKENS = 32;  // that are convolved at once
constexpr int MOST_VECTORS = REGISTER_BYTES == 64 ? 4 : REGISTER_BYTES == 32 ? 2 : 1;  // columns of a piece, in vectors
constexpr int64_t MOST_PIECES = 8;   // of an item; they stay in the L2 cache
constexpr int64_t CHANNELS = 128;    // of an item that convolves only
constexpr int64_t SLICE = 512;       // numbers of inputs that are one unit of work
constexpr float NORM_EPS = 1e-6f;

enum class Rule { delta, mamba2, convolution, kda };

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
  int64_t num_blocks, block_numbers;  // numbers from block to block
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
  int64_t num_gates() const {
    if (rule == Rule::convolution) return 0;
    return value_heads + (rule == Rule::delta ? value_heads : rule == Rule::kda ? num_keys() : 0);
  }
  int64_t width() const { return num_channels() + num_gates(); }
  bool corrects() const { return rule != Rule::mamba2; }
  int64_t vectors() const { return up_to(value_dim, LANES) / LANES; }                 // of a row of a state
  int64_t pieces() const { return (vectors() + MOST_VECTORS - 1) / MOST_VECTORS; }   // of a head
  int64_t piece_vectors() const { return (vectors() + pieces() - 1) / pieces(); }

  bool is_computed(const Chunk& c) const { return c.start < c.stop && c.block >= 0 && c.block < num_blocks; }
  S* state(int64_t block) const { return data + block * block_numbers; }
  S* inputs_of(int64_t block) const { return state(block) + num_values() * key_dim; }

  // Where the inputs of a position from `settled - conv_width + 1` on are: of type T from `start` on, else of type S.
  // nullptr: they are zeros.
  INLINE_MEMBER const void* row(const Chunk& c, int64_t position) const {
    if (position >= c.start) return inputs + (c.token + position - c.start) * stride;
    if (c.start == 0) return nullptr;
    return inputs_of(c.block) + (position - c.settled + conv_width - 1) * width();
  }

  template <class W>
  void read_taps(int64_t channel, int64_t n, float* taps) const {
    auto weight = (const W*)conv_weight + channel * conv_width;
    memset(taps, 0, (conv_width + 1) * LANES * sizeof(float));
    if (n == LANES && conv_width == 4) {
      for (int i = 0; i < LANES; i++)
        for (int w = 0; w < 4; w++) taps[w * LANES + i] = to_float(weight[i * 4 + w]);
    } else {
      for (int64_t i = 0; i < n; i++)
        for (int64_t w = 0; w < conv_width; w++) taps[w * LANES + i] = to_float(weight[i * conv_width + w]);
    }
    if (conv_bias) store(taps + conv_width * LANES, load_some((const W*)conv_bias + channel, n));
  }
  // Writes the weights of n channels, at most 16: those of the oldest token first, then biases.
  void read_taps(int64_t channel, int64_t n, float* taps) const {
    has_short_weights ? read_taps<bf16>(channel, n, taps) : read_taps<float>(channel, n, taps);
  }
};

// The inputs of some tokens that follow each other, and of the conv_width - 1 before them.
template <class S, class T>
struct Window {
  const void** rows;
  int64_t tokens, tail, stored;  // stored: rows of type S, which come first
  float* memory;                 // (rows, 16)

  Window(const Layer<S, T>& layer, const Chunk& chunk, int64_t position, int64_t count, char* begin) {
    tokens = count, tail = layer.conv_width - 1, stored = max(0, min(tokens + tail, chunk.start - position + tail));
    memory = (float*)begin, rows = (const void**)(memory + (tokens + tail) * LANES);
    for (int64_t j = 0; j < tokens + tail; j++) rows[j] = layer.row(chunk, position - tail + j);
  }
  static int64_t bytes(int64_t conv_width) { return (TOKENS + conv_width - 1) * (LANES * sizeof(float) + sizeof(void*)); }

  // Calls write(j, x) with the convolved numbers of n channels, at most 16, of each token.
  template <class F>
  INLINE_MEMBER void convolve(int64_t channel, int64_t n, const float* taps, F write) const {
    int64_t row = 0;
    for (; row < stored; row++)
      store(memory + row * LANES, rows[row] ? load_some((const S*)rows[row] + channel, n) : Vec{});
    for (; row < tokens + tail; row++) store(memory + row * LANES, load_some((const T*)rows[row] + channel, n));
    for (int64_t j = 0; j < tokens; j++) {
      Vec x = load(taps + (tail + 1) * LANES);
      for (int64_t w = 0; w <= tail; w++) x = fma(load((const float*)memory + (j + w) * LANES), load(taps + w * LANES), x);
      write(j, x);
    }
  }

  // Reads one number of each token.
  void read(int64_t number, float* out) const {
    for (int64_t j = 0; j < tokens; j++)
      out[j] = tail + j < stored ? to_float(((const S*)rows[tail + j])[number]) : to_float(((const T*)rows[tail + j])[number]);
  }
  // n numbers of token j from `number` on.
  INLINE_MEMBER Vec read(int64_t j, int64_t number, int64_t n) const {
    const void* row = rows[tail + j];
    return tail + j < stored ? load_some((const S*)row + number, n) : load_some((const T*)row + number, n);
  }
};

// Some columns of a head's state.
struct Piece {
  int64_t head, column, size, vectors;  // size: number of columns
  float *state, *taps;                  // (key_dim, vectors, 16), and of the values
};

// What a thread needs for an item: `pieces` pieces of value heads that share a key head.
struct Memory {
  int64_t keys, columns;  // numbers of a row of k and of v
  float* states;          // (pieces, key_dim, columns)
  float* taps;            // (vectors of q, k and of the pieces, conv_width + 1, 16)
  char* window;           // see Window
  float *q, *k;           // (TOKENS, keys)
  float* v;               // (TOKENS, columns), then the outputs
  float *products, *decays, *factors;  // (TOKENS,): k . q, decay of the state, and beta or time step
  float *row_decays, *decayed_q, *decayed_k;  // (TOKENS, keys), of Rule::kda: decays of the state's rows, and their products
  size_t bytes;
  const char* ahead = nullptr;  // what is likely to be read next, and is prefetched during passes that begin or end a sweep

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
    window = (char*)floats(Window<S, T>::bytes(layer.conv_width) / sizeof(float));
    q = floats(TOKENS * keys), k = floats(TOKENS * keys), v = floats(TOKENS * columns);
    products = floats(TOKENS), decays = floats(TOKENS), factors = floats(TOKENS);
    int64_t decayed = layer.rule == Rule::kda ? TOKENS * keys : 0;
    row_decays = floats(decayed), decayed_q = floats(decayed), decayed_k = floats(decayed);
    bytes = next - begin;
  }
};

// ---- the recurrence ----

// A token that is not applied yet: S = decay S + k added^T.
template <int N>
struct Token {
  const float *k, *decays;  // decays: of the rows, in place of `decay`
  Vec decay, added[N];
};

// Applies a token to the state (rows, 16 N), if `applies`, then adds S^T k and S^T q to of_k and of_q, if k and q are needed.
template <int N, bool by_row, bool applies, bool reads_k, bool reads_q>
INLINE void pass(float* state, int64_t rows, const Token<N>& token, const float* k, const float* q, Vec (&of_k)[N],
                 Vec (&of_q)[N], const char* ahead = nullptr) {
  for (int64_t i = 0; i < rows; i++, state += N * LANES) {
    if (!applies || !reads_q) __builtin_prefetch(ahead + i * 64, 0, 2);
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) {
      Vec s = load((const float*)state + n * LANES);
      if (applies) {
        s = fma(splat(token.k[i]), token.added[n], s * (by_row ? splat(token.decays[i]) : token.decay));
        store(state + n * LANES, s);
      }
      if (reads_k) of_k[n] = fma(splat(k[i]), s, of_k[n]);
      if (reads_q) of_q[n] = fma(splat(q[i]), s, of_q[n]);
    }
  }
}

// Applies tokens [begin, end) to a piece; the last of them only if `applies_last`. Their values become their outputs.
template <int N, bool corrects, bool by_row>
static void sweep(Memory& m, float* state, int64_t rows, int64_t begin, int64_t end, bool applies_last, float skip) {
  Token<N> token;
  for (int64_t j = begin; j < end; j++) {
    const float *k = (by_row ? m.decayed_k : m.k) + j * m.keys, *q = (by_row ? m.decayed_q : m.q) + j * m.keys;
    float* v = m.v + j * m.columns;
    Vec of_k[N] = {}, of_q[N] = {};
    if (j > begin) {
      pass<N, by_row, true, corrects, true>(state, rows, token, k, q, of_k, of_q);
    } else {
      pass<N, by_row, false, corrects, true>(state, rows, token, k, q, of_k, of_q, m.ahead);
      m.ahead += rows * 64;
    }
    token.k = m.k + j * m.keys, token.decays = m.row_decays + j * m.keys, token.decay = splat(m.decays[j]);
    Vec decay = by_row ? splat(1) : token.decay;
    Vec factor = splat(m.factors[j]), product = splat(m.products[j]);
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) {
      Vec value = load((const float*)v + n * LANES);
      token.added[n] = (corrects ? fma(-of_k[n], decay, value) : value) * factor;
      Vec y = fma(product, token.added[n], of_q[n] * decay);
      store(v + n * LANES, corrects ? y : fma(splat(skip), value, y));
    }
  }
  Vec none[N];
  if (applies_last) {
    pass<N, by_row, true, false, false>(state, rows, token, nullptr, nullptr, none, none, m.ahead);
    m.ahead += rows * 64;
  }
}

template <bool corrects, bool by_row>
static void sweep_by(int64_t vectors, Memory& m, float* state, int64_t rows, int64_t begin, int64_t end,
                     bool applies_last, float skip) {
  switch (vectors) {
#define WIDTH(n) \
  case n: \
    if constexpr (n <= MOST_VECTORS) sweep<n, corrects, by_row>(m, state, rows, begin, end, applies_last, skip); \
    return;
    WIDTH(1) WIDTH(2) WIDTH(3) WIDTH(4)
#undef WIDTH
  }
}

// Consecutive pieces of the value heads that share a key head, in one chunk.
template <class S, class T>
struct Item {
  const Layer<S, T>& layer;
  Memory& m;
  int64_t key_head, first, count;  // first: piece among those of the key head
  int64_t index;                   // of the chunk
  Chunk chunk;

  Piece piece(int64_t number) const {
    int64_t pieces = layer.pieces(), column = (first + number) % pieces * m.columns;
    Piece p;
    p.head = key_head * (layer.value_heads / layer.key_heads) + (first + number) / pieces;
    p.column = column, p.size = min(m.columns, layer.value_dim - column), p.vectors = up_to(p.size, LANES) / LANES;
    p.state = m.states + number * layer.key_dim * m.columns;
    p.taps = m.taps + (2 * m.keys + number * m.columns) * (layer.conv_width + 1);
    return p;
  }
  int64_t channel(const Piece& p) const { return 2 * layer.num_keys() + p.head * layer.value_dim + p.column; }
  int64_t key_channel(int64_t part) const { return (part * layer.key_heads + key_head) * layer.key_dim; }

  // Reads the weights of `size` channels.
  void read_taps(int64_t channel, int64_t size, float* taps) const {
    each_vector(size, [&](int64_t i, int64_t n) { layer.read_taps(channel + i, n, taps + i * (layer.conv_width + 1)); });
  }
  void read_taps() const {
    for (int64_t part = 0; part < 2; part++)
      read_taps(key_channel(part), layer.key_dim, m.taps + part * m.keys * (layer.conv_width + 1));
    for (int64_t number = 0; number < count; number++) {
      Piece p = piece(number);
      read_taps(channel(p), p.size, p.taps);
    }
  }

  // Convolves `size` channels of the tokens of a window: out (tokens, row).
  void convolve(const Window<S, T>& window, int64_t channel, int64_t size, const float* taps, float* out, int64_t row) const {
    each_vector(size, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
      window.convolve(channel + i, n, taps + i * (layer.conv_width + 1),
                      [&](int64_t j, Vec x) __attribute__((always_inline)) { store(out + j * row + i, x * sigmoid(x)); });
    });
  }

  void read_keys(const Window<S, T>& window) const {
    for (int64_t part = 0; part < 2; part++) {
      const float* taps = m.taps + part * m.keys * (layer.conv_width + 1);
      convolve(window, key_channel(part), layer.key_dim, taps, part ? m.k : m.q, m.keys);
    }
    auto dot = [&](const float* x, const float* y) {
      return sum_row(m.keys, [&](Vec sum, int64_t i, int64_t) __attribute__((always_inline)) {
        return fma(load(x + i), load(y + i), sum);
      });
    };
    auto scale = [&](float* x, float factor) {
      for (int64_t i = 0; i < m.keys; i += LANES) store(x + i, load((const float*)x + i) * factor);
    };
    for (int64_t j = 0; j < window.tokens; j++) {
      float *q = m.q + j * m.keys, *k = m.k + j * m.keys;
      if (layer.corrects()) {
        scale(q, 1.0f / __builtin_sqrtf((dot(q, q) + NORM_EPS) * (float)layer.key_dim));
        scale(k, 1.0f / __builtin_sqrtf(dot(k, k) + NORM_EPS));
      }
      m.products[j] = dot(k, q);
    }
  }

  void read_gates(const Window<S, T>& window, int64_t head) const {
    bool delta = layer.rule == Rule::delta;
    window.read(layer.num_channels() + head, m.factors);
    if (layer.rule == Rule::kda) return read_row_gates(window, head);
    if (delta) window.read(layer.num_channels() + layer.value_heads + head, m.decays);
    Vec rate = splat(layer.decay[head]), bias = splat(layer.time_bias[head]);
    for (int64_t j = 0; j < window.tokens; j += LANES) {
      Vec first = load((const float*)m.factors + j), last = delta ? load((const float*)m.decays + j) : first;
      Vec time = softplus(last + bias);
      if (!delta) time = vmin(splat(layer.most_time), vmax(splat(layer.least_time), time));  // NaN stays NaN
      store(m.factors + j, delta ? sigmoid(first) : time);
      store(m.decays + j, exp(rate * time));
    }
  }

  void read_row_gates(const Window<S, T>& window, int64_t head) const {
    int64_t first = key_head * layer.key_dim, gate = layer.num_channels() + layer.value_heads + first;
    Vec rate = splat(layer.decay[head]);
    for (int64_t j = 0; j < window.tokens; j += LANES) store(m.factors + j, sigmoid(load((const float*)m.factors + j)));
    for (int64_t j = 0; j < window.tokens; j++)
      each_vector(layer.key_dim, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        Vec decay = exp(rate * softplus(window.read(j, gate + i, n) + load_some(layer.time_bias + first + i, n)));
        int64_t place = j * m.keys + i;
        store(m.row_decays + place, decay);
        store(m.decayed_q + place, load((const float*)m.q + place) * decay);
        store(m.decayed_k + place, load((const float*)m.k + place) * decay);
      });
  }

  S* stored(int64_t block, const Piece& p) const {
    return layer.state(block) + p.head * layer.key_dim * layer.value_dim + p.column;
  }

  // Reads the states of all pieces, row by row of a head: hardware prefetches what is read in order.
  void read_states() const {
    if (chunk.start == 0) return (void)memset(m.states, 0, count * layer.key_dim * m.columns * sizeof(float));
    for (int64_t number = 0, end; number < count; number = end) {
      end = min(count, number + layer.pieces() - (first + number) % layer.pieces());
      Piece p = piece(number);
      const S* from = stored(chunk.block, p);
      for (int64_t row = 0; row < layer.key_dim; row++) {
        const S* next = from + row * layer.value_dim;
        for (int64_t other = number; other < end; other++) {
          int64_t left = min(m.columns, layer.value_dim - p.column - (other - number) * m.columns);
          float* to = p.state + (other - number) * layer.key_dim * m.columns + row * up_to(left, LANES);
          each_vector(left, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
            store(to + i, load_some(next + i, n));
          });
          next += m.columns;
        }
      }
    }
  }

  void write_state(const Piece& p, int64_t block) const {
    S* to = stored(block, p);
    const float* from = p.state;
    for (int64_t row = 0; row < layer.key_dim; row++, to += layer.value_dim, from += p.vectors * LANES)
      each_vector(p.size, [&](int64_t i, int64_t n) __attribute__((always_inline)) { store_some(to + i, load(from + i), n); });
  }

  // Writes the blocks that are to stand behind `position`.
  void write_states(const Piece& p, int64_t position) const {
    if (position == chunk.settles && (position != chunk.settled || chunk.start == 0)) write_state(p, chunk.block);
    for (int64_t i = 0; i < layer.num_snapshots; i++) {
      const Snapshot& one = layer.snapshots[i];
      if (one.chunk == index && one.position == position) write_state(p, one.block);
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

  void write_outputs(const Piece& p, int64_t position, int64_t tokens) const {
    for (int64_t j = max(0, chunk.start - position); j < tokens; j++) {
      T* row = layer.out + (chunk.token + position + j - chunk.start) * layer.num_values();
      T* out = row + p.head * layer.value_dim + p.column;
      each_vector(p.size, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        store_some(out + i, load((const float*)m.v + j * m.columns + i), n);
      });
    }
  }

  void compute_piece(const Piece& p, int64_t position, const Window<S, T>& window) const {
    convolve(window, channel(p), p.size, p.taps, m.v, m.columns);
    if (position == chunk.settled) write_states(p, position);
    float skip = layer.skip ? layer.skip[p.head] : 0;
    auto sweep_here = sweep_by<false, false>;
    if (layer.corrects()) sweep_here = layer.rule == Rule::kda ? sweep_by<true, true> : sweep_by<true, false>;
    for (int64_t begin = position, stop = position + window.tokens; begin < stop;) {
      int64_t end = next_written(begin, stop);
      bool is_needed = end < chunk.stop || end == chunk.settles;
      sweep_here(p.vectors, m, p.state, layer.key_dim, begin - position, end - position, is_needed, skip);
      write_states(p, end);
      begin = end;
    }
    write_outputs(p, position, window.tokens);
  }

  void compute() const {
    read_states();
    for (int64_t position = chunk.settled; position < chunk.stop; position += TOKENS) {
      Window<S, T> window(layer, chunk, position, min(TOKENS, chunk.stop - position), m.window);
      read_keys(window);
      for (int64_t number = 0; number < count; number++) {
        Piece p = piece(number);
        if (!number || !p.column) read_gates(window, p.head);  // once for the pieces of a head
        compute_piece(p, position, window);
      }
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
  int64_t per_part = (pieces + parts - 1) / parts, items = layer.num_chunks * layer.key_heads * parts, last = -1;
  Memory memory(layer, per_part, (char*)team.scratch(Memory(layer, per_part, nullptr).bytes));
  memset(memory.q, 0, (char*)memory.products - (char*)memory.q);  // padding of rows stays 0
  auto item_of = [&](int64_t number) {
    int64_t index = number % layer.num_chunks, part = number / layer.num_chunks, first = part % parts * per_part;
    return Item<S, T>{layer, memory, part / parts, first, min(per_part, pieces - first), index, layer.chunks[index]};
  };
  auto state_of = [&](int64_t number) {  // an item that a thread is likely to take, when all take turns
    Item<S, T> item = item_of(number);
    return layer.is_computed(item.chunk) ? (const char*)item.stored(item.chunk.block, item.piece(0)) : memory.ahead;
  };
  for (int64_t number = team.take(); number < items; number = team.take()) {
    Item<S, T> item = item_of(number);
    if (!layer.is_computed(item.chunk) || item.count <= 0) continue;
    if (number / layer.num_chunks != last) item.read_taps();  // those of another chunk are the same
    last = number / layer.num_chunks;
    if (number + team.size < items) memory.ahead = state_of(number + team.size);
    item.compute();
  }
}

// "convolution": the convolved numbers are the outputs.
template <class S, class T>
static void recur_channels(const Layer<S, T>& layer, const Team& team) {
  int64_t values = layer.num_values(), slices = (values + CHANNELS - 1) / CHANNELS, last = -1;
  int64_t taps_of_vector = (layer.conv_width + 1) * LANES, taps_size = CHANNELS / LANES * taps_of_vector;
  auto taps = (float*)team.scratch(taps_size * sizeof(float) + Window<S, T>::bytes(layer.conv_width));
  for (int64_t item = team.take(); item < layer.num_chunks * slices; item = team.take()) {
    const Chunk& chunk = layer.chunks[item % layer.num_chunks];
    int64_t slice = item / layer.num_chunks, first = slice * CHANNELS, size = min(CHANNELS, values - first);
    if (!layer.is_computed(chunk)) continue;
    auto taps_of = [&](int64_t i) { return taps + i / LANES * taps_of_vector; };
    if (slice != last) each_vector(size, [&](int64_t i, int64_t n) { layer.read_taps(first + i, n, taps_of(i)); });
    last = slice;
    for (int64_t position = chunk.start; position < chunk.stop; position += TOKENS) {
      T* out = layer.out + (chunk.token + position - chunk.start) * values + first;
      Window<S, T> window(layer, chunk, position, min(TOKENS, chunk.stop - position), (char*)(taps + taps_size));
      each_vector(size, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        window.convolve(first + i, n, taps_of(i), [&](int64_t j, Vec x) __attribute__((always_inline)) {
          store_some(out + j * values + i, x, n);
        });
      });
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
    const void* from = layer.row(chunk, position - tail + row);
    bool is_new = position - tail + row >= chunk.start;
    each_vector(end - begin, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
      Vec x = is_new ? load_some((const T*)from + begin + i, n) : from ? load_some((const S*)from + begin + i, n) : Vec{};
      store_some(to + i, x, n);
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
