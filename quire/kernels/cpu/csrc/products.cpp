// Matrix products: x (rows, k) times a packed weight (n, k), in bf16 or float32.
//
// A packed weight is cut into tiles of 16 of its rows. A tile has one vector of 64 bytes for each step along k: float32
// [k][16], or bf16 pairs of terms [k / 2][16][2] with k padded by zeros to a multiple of 32. The dot-product
// instructions read this layout, and 16 steps of bf16 are one AMX tile register, so one copy serves all builds.
// One thread adds the terms in order. So the result of a row depends neither on the values of other rows nor on
// threads, but on whether tile registers are used.
#include "activation.h"
#include "team.h"
#include "terms.h"

namespace quire::ISA {

constexpr int64_t VECTOR_BYTES = 64;

// Vectors of a tile.
template <class T>
INLINE int64_t steps_of(int64_t k) {
  return sizeof(T) == sizeof(bf16) ? up_to(k, 32) / 2 : k;
}

// ---- packing ----

// Writes rows [start, start + n) of a packed weight and nothing else: the caller has zeroed the padding.
// source (n, k), target, dtype (0 float32, 1 bf16), n, k, start
template <class T>
static void pack(const Arg* a, const Team& team) {
  auto source = (const T*)a[0].data;
  auto target = (T*)a[1].data;
  int64_t n = a[3].integer, k = a[4].integer, start = a[5].integer, begin, end;
  constexpr int64_t terms = Term<T>::width;
  int64_t steps = steps_of<T>(k), first_tile = start / 16;
  team.share((start + n + 15) / 16 - first_tile, 1, &begin, &end);
  for (int64_t tile = first_tile + begin; tile < first_tile + end; tile++) {
    T* out = target + tile * steps * 16 * terms;
    int64_t before = tile * 16 - start;  // first source row of the tile; negative if the tile begins before the source
    int64_t first = max(0, -before), last = min(16, n - before);
    int64_t whole = last - first == 16 && k % terms == 0 ? k / terms / 16 * 16 : 0;  // steps copied vector by vector
    for (int64_t s = 0; s < whole; s += 16)
      for (int64_t i = 0; i < 16; i++) {
        const T* row = source + (before + i) * k + s * terms;
        for (int64_t j = 0; j < 16; j++) memcpy(out + ((s + j) * 16 + i) * terms, row + j * terms, terms * sizeof(T));
      }
    for (int64_t i = first; i < last; i++)
      for (int64_t column = whole * terms; column < k; column++)
        out[(column / terms * 16 + i) * terms + column % terms] = source[(before + i) * k + column];
  }
}

void pack_rows(const Arg* a, const Team& team) { a[2].integer ? pack<bf16>(a, team) : pack<float>(a, team); }

// Rows of a packed weight, times `scale`: for embeddings, and to unpack a weight.
// weight, ids (count,) int64, target (count, k), dtype, count, k, n (other ids give zeros), scale
template <class T>
static void unpack(const Arg* a, const Team& team) {
  auto weight = (const T*)a[0].data;
  auto ids = (const int64_t*)a[1].data;
  auto target = (T*)a[2].data;
  int64_t count = a[4].integer, k = a[5].integer, n = a[6].integer, begin, end;
  float scale = (float)a[7].number;
  constexpr int64_t terms = Term<T>::width;
  int64_t steps = steps_of<T>(k);
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
  int64_t gate;          // -1, or an Activation: out = activation(x * gate rows) * (x * up rows), n rows each, padded
  int64_t tiles;         // whether tile registers may be used
};

// Columns are computed in panels of up to four tiles. The tiles of a gated product alternate: gate, up, gate, up.
template <class T>
struct Panel {
  const char* w[4];  // tile by tile
  int64_t columns[4];  // first column in `out`, and in each half of the bias
};

// Tiles from `end` on belong to another thread or do not exist: the first tile replaces them, and is not written there.
template <class T, int NB>
INLINE Panel<T> panel_of(const Product& p, int64_t tile, int64_t end) {
  Panel<T> panel;
  int64_t tile_bytes = steps_of<T>(p.k) * VECTOR_BYTES, half = (p.n + 15) / 16;
  for (int i = 0; i < NB; i++) {
    int64_t column = p.gate < 0 ? tile + i : tile + i / 2;
    panel.w[i] = p.weight + (column + (p.gate >= 0 && i % 2 ? half : 0)) * tile_bytes;
    panel.columns[i] = column * 16;
    if (column < end) continue;
    panel.w[i] = panel.w[0];
    panel.columns[i] = p.n;
  }
  return panel;
}

template <class T>
INLINE Vec bias_of(const Product& p, int64_t column, int64_t half) {
  if (p.bias == nullptr) return Vec{};
  return load_some((const T*)p.bias + half * p.n + column, min(16, p.n - column));
}

// Writes 16 columns of a row: adds the bias, and applies the gate if there is one (sums: gate rows, gated: up rows).
template <class T>
INLINE void finish(const Product& p, int64_t row, int64_t column, Vec sums, Vec gated) {
  T* out = (T*)p.out + row * p.out_stride + column;
  sums += bias_of<T>(p, column, 0);
  if (p.gate >= 0) sums = activate((Activation)p.gate, rounded<T>(sums)) * rounded<T>(gated + bias_of<T>(p, column, 1));
  store_some(out, sums, min(16, p.n - column));
}

// A block of rows in the type Held.
template <class T>
struct HeldRows {
  const typename Term<T>::Held* x;
  int64_t stride, first, count;  // rows [first, first + count) of the product
};

// What a pass over a panel prefetches: `ahead` or `every` or nothing.
struct Prefetch {
  int64_t ahead;  // of this panel to the L1 cache: this number of bytes before the present step; 0: nothing
  int64_t every;  // of the next panel to the L2 cache: one vector per tile in so many steps; 0: nothing
  const char* next[4];  // where the vectors of the next panel begin, tile by tile
};

template <class T, int MR, int NB>
static void multiply(const Product& p, const Panel<T>& panel, const HeldRows<T>& rows, int64_t row, Prefetch fetch) {
  constexpr int width = Term<T>::width;
  const auto* x = rows.x + row * rows.stride;
  int64_t steps = p.k / width;
  Vec sums[MR][NB];
#pragma GCC unroll 8
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 8
    for (int n = 0; n < NB; n++) sums[m][n] = Vec{};
  int64_t left = fetch.every;
  for (int64_t s = 0; s < steps; s++) {
    if (fetch.ahead) {
#pragma GCC unroll 4
      for (int n = 0; n < NB; n++) __builtin_prefetch(panel.w[n] + s * VECTOR_BYTES + fetch.ahead);
    } else if (--left == 0) {
      left = fetch.every;
#pragma GCC unroll 4
      for (int n = 0; n < NB; n++) __builtin_prefetch(fetch.next[n], 0, 2), fetch.next[n] += VECTOR_BYTES;
    }
    add_terms<T>(sums, x + s * width, rows.stride, [&](int n) { return panel.w[n] + s * VECTOR_BYTES; });
  }
  alignas(64) float all[MR][NB][LANES];
#pragma GCC unroll 8
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 8
    for (int n = 0; n < NB; n++) store(all[m][n], sums[m][n]);
  for (int m = 0; m < MR; m++)
    for (int n = 0; n < NB; n += p.gate < 0 ? 1 : 2)
      finish<T>(p, rows.first + row + m, panel.columns[n], load(all[m][n]), load(all[m][n + 1 < NB ? n + 1 : n]));
}

constexpr int64_t HELD_ROWS = 256;      // the most rows of a block, which stays in the L1 and L2 caches
constexpr int64_t HELD_BYTES = 1 << 20;  // the most bytes of a block, unless 24 rows need more
constexpr int64_t PREFETCH_BYTES = 2048;

// Computes tiles of columns [begin, end), NB tiles of the weight at once. A panel is computed in passes of up to 8 rows.
// Each pass prefetches an equal part of the next panel, so that memory is read during all passes. Nothing prefetches the
// first panel, so its first pass does. So does a single pass if there are few panels, or if they have four tiles and may
// be too large for the L2 cache.
template <class T, int NB>
static void multiply_block(const Product& p, const HeldRows<T>& rows, int64_t begin, int64_t end) {
  constexpr int most = min(8, VECTORS_AT_ONCE / NB);
  int64_t passes = (rows.count + most - 1) / most, each = (rows.count + passes - 1) / passes;
  int64_t steps = steps_of<T>(p.k), tiles = p.gate < 0 ? NB : NB / 2;
  bool alone = passes == 1 && (NB == 4 || end - begin < 8 * tiles);
  for (int64_t tile = begin; tile < end; tile += tiles) {
    Panel<T> panel = panel_of<T, NB>(p, tile, end);
    Panel<T> next = panel_of<T, NB>(p, min(tile + tiles, end - 1), end);
    for (int64_t pass = 0; pass < passes; pass++) {
      int64_t row = pass * each;
      Prefetch fetch{};
      if ((pass == 0 && tile == begin) || alone)
        fetch.ahead = rows.first == 0 ? PREFETCH_BYTES : 0;
      else if (tile + tiles < end)
        fetch.every = passes;
      for (int n = 0; n < NB; n++) fetch.next[n] = next.w[n] + pass * (steps / passes) * VECTOR_BYTES;
      switch (min(each, rows.count - row)) {
#define ROWS(count) \
  case count: \
    multiply<T, min(count, most), NB>(p, panel, rows, row, fetch); \
    break;
        ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8)
#undef ROWS
      }
    }
  }
}

// Rows [first, first + count): converted in the thread's memory if Held is another type, otherwise in place.
template <class T>
static HeldRows<T> hold_rows(const Product& p, int64_t first, int64_t count, const Team& team) {
  using Held = typename Term<T>::Held;
  auto x = (const T*)p.x + first * p.x_stride;
  if (sizeof(T) == sizeof(Held)) return {(const Held*)x, p.x_stride, first, count};
  int64_t stride = up_to(p.k, LANES) + LANES;  // rarely a power of two, so that rows do not share cache sets
  auto held = (Held*)team.scratch(count * stride * sizeof(Held));
  for (int64_t i = 0; i < count; i++) hold(x + i * p.x_stride, held + i * stride, p.k);
  return {held, stride, first, count};
}

// With few rows, several tiles are computed at once, so that there are enough independent sums.
template <class T>
static void with_vectors(const Product& p, const Team& team) {
  bool gated = p.gate >= 0;
  int64_t row_bytes = p.k * sizeof(typename Term<T>::Held), begin, end;
  int64_t most = max(24, min(HELD_ROWS, HELD_BYTES / row_bytes / 24 * 24));
  team.share((p.n + 15) / 16, gated ? 1 : 2, &begin, &end);
  for (int64_t first = 0; first < p.rows && begin < end; first += most) {
    HeldRows<T> rows = hold_rows<T>(p, first, min(most, p.rows - first), team);
    if (VECTORS_AT_ONCE >= 4 && 4 * rows.count <= VECTORS_AT_ONCE)
      multiply_block<T, VECTORS_AT_ONCE >= 4 ? 4 : 2>(p, rows, begin, end);
    else if (gated || VECTORS_AT_ONCE >= 16 || 2 * rows.count <= VECTORS_AT_ONCE)
      multiply_block<T, 2>(p, rows, begin, end);
    else
      multiply_block<T, VECTORS_AT_ONCE >= 16 ? 2 : 1>(p, rows, begin, end);
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
