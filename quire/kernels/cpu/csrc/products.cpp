// Products with weights: x (rows, k) times a packed weight (n, k), in bf16 or float32.
//
// A packed weight is cut into tiles of 16 of its rows. A tile holds, for each step along k, one vector of 64 bytes:
// float32 [k][16], or in bf16 pairs of terms [k / 2][16][2] with k filled up to a multiple of 32 by zeros. That is what the
// dot-product instructions read, and 16 steps of bf16 are one tile register of AMX, so one copy serves all.
// Terms are added up in order, by one thread: a row's result depends neither on other rows nor on threads, but on
// whether tile registers were used.
#include "activation.h"
#include "simd.h"
#include "team.h"

namespace quire::ISA {

constexpr int64_t VECTOR_BYTES = 64;

template <class T>
struct Step;
template <>
struct Step<bf16> {
  using Term = uint32_t;  // a pair
  static constexpr int64_t terms = 2;
  static int64_t count(int64_t k) { return up_to(k, 32) / 2; }
  INLINE Vec dot(Vec acc, Term a, const char* w) { return dot_pairs(acc, a, load_pairs(w)); }
};
template <>
struct Step<float> {
  using Term = float;
  static constexpr int64_t terms = 1;
  static int64_t count(int64_t k) { return k; }
  INLINE Vec dot(Vec acc, Term a, const char* w) { return fma(splat(a), load((const float*)w), acc); }
};

// ---- packing ----

// source (n, k), target, dtype (0 float32, 1 bf16), n, k
template <class T>
static void pack(const T* source, T* target, int64_t n, int64_t k, const Team& team) {
  constexpr int64_t terms = Step<T>::terms;
  int64_t steps = Step<T>::count(k), begin, end;
  team.share((n + 15) / 16, 1, &begin, &end);
  for (int64_t tile = begin; tile < end; tile++) {
    T* out = target + tile * steps * 16 * terms;
    int64_t whole = tile * 16 + 16 <= n && k % terms == 0 ? k / terms / 16 * 16 : 0;  // steps without any padding
    for (int64_t s = 0; s < whole; s += 16)
      for (int64_t i = 0; i < 16; i++) {
        const T* row = source + (tile * 16 + i) * k + s * terms;
        for (int64_t j = 0; j < 16; j++) memcpy(out + ((s + j) * 16 + i) * terms, row + j * terms, terms * sizeof(T));
      }
    for (int64_t s = whole; s < steps; s++)
      for (int64_t i = 0; i < 16; i++)
        for (int64_t t = 0; t < terms; t++) {
          int64_t row = tile * 16 + i, column = s * terms + t;
          out[(s * 16 + i) * terms + t] = row < n && column < k ? source[row * k + column] : T{};
        }
  }
}

void pack_weight(const Arg* a, const Team& team) {
  if (a[2].integer)
    pack((const bf16*)a[0].data, (bf16*)a[1].data, a[3].integer, a[4].integer, team);
  else
    pack((const float*)a[0].data, (float*)a[1].data, a[3].integer, a[4].integer, team);
}

// Rows of a packed weight, times a number: for the embeddings of tokens, and for whoever wants the weight back.
// weight, ids (count,) int64, target (count, k), dtype, count, k, n (other ids give zeros), scale
template <class T>
static void unpack(const Arg* a, const Team& team) {
  auto weight = (const T*)a[0].data;
  auto ids = (const int64_t*)a[1].data;
  auto target = (T*)a[2].data;
  int64_t count = a[4].integer, k = a[5].integer, n = a[6].integer, begin, end;
  float scale = (float)a[7].number;
  constexpr int64_t terms = Step<T>::terms;
  int64_t steps = Step<T>::count(k);
  team.share(count, 1, &begin, &end);
  for (int64_t i = begin; i < end; i++) {
    int64_t row = ids[i];
    const T* tile = weight + (row / 16 * steps * 16 + row % 16) * terms;
    for (int64_t column = 0; column < k; column++) {
      T value = row >= 0 && row < n ? tile[column / terms * 16 * terms + column % terms] : T{};
      if (scale == 1.0f)
        target[i * k + column] = value;
      else
        put(target + i * k + column, to_float(value) * scale);
    }
  }
}

void unpack_rows(const Arg* a, const Team& team) { a[3].integer ? unpack<bf16>(a, team) : unpack<float>(a, team); }

// ---- products ----

struct Product {
  const char* x;
  const char* weight;
  const char* bias;  // (n,), of a gated product (2, n); or null
  char* out;
  int64_t is_bf16;
  int64_t rows, n, k;    // n: columns of `out`
  int64_t x_stride, out_stride;  // elements from row to row
  int64_t gate;          // -1, or an Activation: out = activation(x gate_rows) * (x up_rows), each n rows and padded
  int64_t tiles;         // whether tile registers may be used
};

// Columns are computed in panels of up to four tiles. Those of a gated product alternate: gate, up, gate, up.
template <class T>
struct Panel {
  const char* w[4];  // tile by tile
  int64_t columns[4];  // first column in `out`, and in its half of the bias
};

template <class T, int NB>
INLINE Panel<T> panel_of(const Product& p, int64_t tile) {
  Panel<T> panel;
  int64_t tile_bytes = Step<T>::count(p.k) * VECTOR_BYTES, half = (p.n + 15) / 16;
  for (int i = 0; i < NB; i++) {
    int64_t column = p.gate < 0 ? tile + i : tile + i / 2;
    panel.w[i] = p.weight + (column + (p.gate >= 0 && i % 2 ? half : 0)) * tile_bytes;
    panel.columns[i] = column * 16;
  }
  return panel;
}

template <class T>
INLINE Vec bias_of(const Product& p, int64_t column, int64_t half) {
  if (p.bias == nullptr) return Vec{};
  return load_some((const T*)p.bias + half * p.n + column, min(16, p.n - column));
}

// What becomes of 16 sums, or of 16 gates and 16 that they gate.
template <class T>
INLINE void finish(const Product& p, int64_t row, int64_t column, Vec sums, Vec gated) {
  T* out = (T*)p.out + row * p.out_stride + column;
  sums += bias_of<T>(p, column, 0);
  if (p.gate >= 0) sums = activate((Activation)p.gate, rounded<T>(sums)) * rounded<T>(gated + bias_of<T>(p, column, 1));
  store_some(out, sums, min(16, p.n - column));
}

template <class T, int MR, int NB>
static void multiply(const Product& p, const Panel<T>& panel, int64_t row, int64_t ahead) {
  using Term = typename Step<T>::Term;
  int64_t steps = p.k / Step<T>::terms;
  const Term* a[MR];
  for (int m = 0; m < MR; m++) a[m] = (const Term*)((const T*)p.x + (row + m) * p.x_stride);
  Vec acc[MR][NB];
  for (int m = 0; m < MR; m++)
    for (int n = 0; n < NB; n++) acc[m][n] = Vec{};
  for (int64_t s = 0; s < steps; s++) {
    for (int n = 0; n < NB; n++) {
      const char* w = panel.w[n] + s * VECTOR_BYTES;
      if (ahead) __builtin_prefetch(w + ahead);
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++) acc[m][n] = Step<T>::dot(acc[m][n], a[m][s], w);
    }
  }
  for (int m = 0; m < MR; m++)
    for (int n = 0; n < NB; n += p.gate < 0 ? 1 : 2)
      finish<T>(p, row + m, panel.columns[n], acc[m][n], acc[m][n + 1 < NB ? n + 1 : n]);
}

template <class T, int NB>
INLINE void multiply_rows(const Product& p, const Panel<T>& panel, int64_t row, int64_t rows, int64_t ahead) {
  switch (rows) {
#define ROWS(count) \
  case count: \
    return multiply<T, count, NB>(p, panel, row, ahead);
    ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8)
#undef ROWS
  }
}

constexpr int64_t ROWS_AT_ONCE = 8;    // in registers
constexpr int64_t ROWS_PER_BLOCK = 256;  // that stay in the nearer caches while all columns pass by
constexpr int64_t PREFETCH_BYTES = 2048;

template <class T>
static void with_vectors(const Product& p, const Team& team) {
  bool gated = p.gate >= 0, few = p.rows <= 4;
  int64_t num_tiles = (p.n + 15) / 16, wide = few ? (gated ? 2 : 4) : (gated ? 1 : 2), begin, end;
  team.share(num_tiles, wide, &begin, &end);
  for (int64_t block = 0; block < p.rows; block += ROWS_PER_BLOCK) {
    int64_t rows = min(ROWS_PER_BLOCK, p.rows - block);
    int64_t passes = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, each = (rows + passes - 1) / passes;
    for (int64_t tile = begin; tile < end;) {
      int64_t ahead = block == 0 ? PREFETCH_BYTES : 0;
      if (few && tile + wide <= end) {
        multiply_rows<T, 4>(p, panel_of<T, 4>(p, tile), block, rows, ahead);
        tile += wide;
        continue;
      }
      bool pair = gated || tile + 2 <= end;
      for (int64_t row = 0; row < rows; row += each) {
        int64_t some = min(each, rows - row);
        if (pair)
          multiply_rows<T, 2>(p, panel_of<T, 2>(p, tile), block + row, some, row == 0 ? ahead : 0);
        else
          multiply_rows<T, 1>(p, panel_of<T, 1>(p, tile), block + row, some, row == 0 ? ahead : 0);
      }
      tile += pair && !gated ? 2 : 1;
    }
  }
}

#if defined(__AMX_TILE__)
#include "product_tiles.h"
#endif

void linear(const Arg* a, const Team& team) {
  Product p;
  p.x = (const char*)a[0].data;
  p.weight = (const char*)a[1].data;
  p.bias = (const char*)a[2].data;
  p.out = (char*)a[3].data;
  int64_t* numbers[] = {&p.is_bf16, &p.rows, &p.n, &p.k, &p.x_stride, &p.out_stride, &p.gate, &p.tiles};
  for (int i = 0; i < 8; i++) *numbers[i] = a[4 + i].integer;
#if defined(__AMX_TILE__)
  if (p.is_bf16 && p.tiles && p.rows > TILES_FROM_ROWS) return with_tiles(p, team);
#endif
  if (p.is_bf16)
    with_vectors<bf16>(p, team);
  else
    with_vectors<float>(p, team);
}

}  // namespace quire::ISA
