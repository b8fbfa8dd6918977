// What all products share: panels of tiles of a packed weight, the output, and the loop over panels with its prefetches.
//
// A packed weight is cut into tiles of 16 of its rows, which are columns of the output. A tile is a number of vectors of
// 64 bytes, each with the next terms of the 16 columns.
#pragma once
#include "activation.h"
#include "low_rank.h"
#include "team.h"

namespace quire::ISA {

constexpr int64_t VECTOR_BYTES = 64;

struct Product {
  const char* x;
  const char* weight;
  const char* bias;  // (n,), of a gated product (2, n); or null
  char* out;
  int64_t rows, n, k;            // n: columns of `out`
  int64_t x_stride, out_stride;  // elements from row to row
  int64_t gate;  // -1, or an Activation: out = activation(x * gate rows) * (x * up rows), n rows each, padded
  Adapters adapters;
};

// Computes a product of weights in bf16 or float32. tiles: whether tile registers may be used.
void multiply(const Product& p, bool is_bf16, bool tiles, const Team& team);

// How the codes of a low-bit weight are stored: see code_packing.cpp.
enum class ScaleType { float32, bfloat16, float16, factored, factored_with_offsets };  // factored: see factors.h
enum class Grid { integers, e2m1, iq4_nl, e4m3 };  // the numbers of codes: see codes.h, and float8 in terms.h
struct Format {
  int64_t bits;
  int64_t terms;       // of a step and a column: 4, 8, or 16 for 6 bits
  int64_t step_bytes;  // one vector, or three for 6 bits
  int64_t steps;       // of a tile
  int64_t groups;      // scales of a row
  int64_t each;        // steps of a group
  int64_t x_groups;    // scales of a row of x; its groups are parts of the weight's
  int64_t x_each;      // steps of a group of x
  ScaleType type;      // of scales and offsets
  Grid grid;

  bool has_factors() const { return type >= ScaleType::factored; }
  bool scaled_at_end() const { return bits == 8 && groups == 1; }  // whether a row's sums are multiplied by its scale last
  int32_t zero() const {  // the code of zero; 128 for grids, whose numbers are looked up with 128 added
    if (grid != Grid::integers) return 128;
    return type == ScaleType::factored_with_offsets ? 0 : 1 << (bits - 1);
  }
};
constexpr int FORMAT_NUMBERS = 5;  // arguments of `format_of`
struct CodeProduct : Product {
  const char *scales, *offsets;  // offsets: or null
  Format format;
  bool is_bf16;  // x, bias and out
};
Format format_of(const Arg* numbers, int64_t k);  // numbers: bits, group size (0: a row), type of scales, grid, group size of x
void multiply_codes(const CodeProduct& p, const Team& team);

// A product from its arguments. sizes: rows, n, k, x_stride, out_stride, gate.
INLINE Product product_of(const Arg* x, const Arg* weight, const Arg* bias, const Arg* out, const Arg* sizes) {
  return {(const char*)x->data,   (const char*)weight->data, (const char*)bias->data, (char*)out->data,
          sizes[0].integer,       sizes[1].integer,          sizes[2].integer,        sizes[3].integer,
          sizes[4].integer,       sizes[5].integer,          {}};
}

// The adapters of a product, behind its sizes: slots int32 (rows,), table, h, all or none; width, before.
INLINE Adapters adapters_of(const Arg* a) {
  return {(const int32_t*)a[0].data, (const LowRank*)a[1].data, (const char*)a[2].data, a[3].integer, a[4].integer};
}

// Columns are computed in panels of up to four tiles. The tiles of a gated product alternate: gate, up, gate, up.
struct Panel {
  int64_t tiles[4];    // of the packed weight
  int64_t columns[4];  // first column in `out`, and in each half of the bias
};

// apart: tiles of columns from one of the panel to the next. Tiles from `end` on belong to another thread or do not exist: the
// first tile replaces them, and is not written there.
template <int NB>
INLINE Panel panel_of(const Product& p, int64_t tile, int64_t end, int64_t apart = 1) {
  Panel panel;
  int64_t half = (p.n + 15) / 16;
  for (int i = 0; i < NB; i++) {
    int64_t column = tile + (p.gate < 0 ? i : i / 2) * apart;
    panel.tiles[i] = column + (p.gate >= 0 && i % 2 ? half : 0);
    panel.columns[i] = column * 16;
    if (column < end) continue;
    panel.tiles[i] = panel.tiles[0];
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

// The same for the sums of MR rows from `row` on and NB tiles.
template <class T, int MR, int NB>
INLINE void finish_all(const Product& p, const Panel& panel, int64_t row, float (&sums)[MR][NB][LANES]) {
  if (p.adapters.slots != nullptr) {
    int64_t tiles[NB];
    for (int n = 0; n < NB; n++) tiles[n] = panel.tiles[n];
    add_adapters<T, MR, NB>(p.adapters, tiles, p.gate >= 0, row, {sums[0][0], NB * LANES, LANES});
  }
  for (int m = 0; m < MR; m++)
    for (int n = 0; n < NB; n += p.gate < 0 ? 1 : 2)
      finish<T>(p, row + m, panel.columns[n], load(sums[m][n]), load(sums[m][n + 1 < NB ? n + 1 : n]));
}
template <class T, int MR, int NB>
INLINE void finish_all(const Product& p, const Panel& panel, int64_t row, const Vec (&sums)[MR][NB]) {
  alignas(64) float all[MR][NB][LANES];
#pragma GCC unroll 8
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 8
    for (int n = 0; n < NB; n++) store(all[m][n], sums[m][n]);
  finish_all<T>(p, panel, row, all);
}

// What a pass over a panel prefetches to the L2 cache: one vector of each tile in `every` steps, in order.
struct Prefetch {
  int64_t place;  // of the next vectors, in bytes from the beginning of each tile; behind a tile: in the tile after it
  int64_t every;  // 0: `place` does not move
  int64_t advance = every ? (VECTOR_BYTES + every - 1) / every : 0, left = every;

  // REPEAT: each vector is prefetched in all of its steps, which takes no branch. Measured: this is faster, except in CodeRows
  // without AVX-512.
  template <bool REPEAT, int NB>
  INLINE_MEMBER void step(const char* const (&tiles)[NB]) {
    if constexpr (!REPEAT) {
      if (--left != 0) return;
      left = every;
    }
#pragma GCC unroll 4
    for (int n = 0; n < NB; n++) __builtin_prefetch(tiles[n] + place, 0, 2);
    place += REPEAT ? advance : VECTOR_BYTES;
  }
};

// Computes the sums of the tiles of a panel one after the other.
template <class Rows, int MR, int NB>
INLINE void tile_by_tile(const Rows& rows, const Panel& panel, int64_t row, const Prefetch& fetch,
                         float (&sums)[MR][NB][LANES]) {
  for (int n = 0; n < NB; n++) {
    Vec one[MR][1];
    Prefetch part = fetch;
    rows.add_tiles(one, panel.tiles + n, row, part);
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) store(sums[m][n], one[m][0]);
  }
}

constexpr int64_t HELD_ROWS = 256;       // the most rows of a block, which stays in the L1 and L2 caches
constexpr int64_t HELD_BYTES = 1 << 20;  // the most bytes of a block, unless 24 rows need more
constexpr int64_t PREFETCH_BYTES = 1024;

// A kind of products (a Product, with more fields) has a class Rows, a block of rows of x as its inner loop reads them:
//
//   AT_ONCE                             sums that fit into registers
//   TILE_BY_TILE                        whether two tiles are computed one after the other if their sums do not fit. So more
//                                       rows use each vector of the weight, which pays where its terms are converted
//   TILE_ROWS                           the most rows of a pass over one tile; above AT_ONCE, their sums are in memory
//   row_bytes(p)                        bytes of a row in the thread's memory
//   Rows(p, first, count, team)         the block of rows [first, first + count), perhaps converted
//   tile_bytes                          bytes of a tile of the weight
//   multiply<MR, NB>(panel, row, fetch) computes rows [row, row + MR) of the block, and writes them to the output
//                                       noinline: GCC keeps the sums of an inlined one in memory
//   add_tiles(sums, tiles, row, fetch)  the sums of rows and tiles; only with TILE_BY_TILE

// Computes tiles of columns [begin, end), NB tiles of the weight at once. They are from as many parts of the range (gate
// and up tiles: half as many). Each part is read in the order of addresses, because the hardware prefetcher reads on behind a tile:
// these vectors are needed next.
// A panel is computed in passes of up to 8 rows. Each pass prefetches an equal share of the next panel, so that memory is read
// during all passes. Nothing prefetches the first panel, so its first pass does. So does a single pass if there are few
// panels, or if they have four tiles and may be too large for the L2 cache.
template <int NB, class Rows>
static void multiply_block(const Product& p, const Rows& rows, int64_t begin, int64_t end) {
  constexpr int at_once = NB == 1 || (NB == 2 && Rows::TILE_BY_TILE) ? Rows::TILE_ROWS : Rows::AT_ONCE / NB;
  constexpr int most = (int)max(1, min(8, at_once));
  int64_t passes = (rows.count + most - 1) / most, each = (rows.count + passes - 1) / passes;
  int64_t tiles = p.gate < 0 ? NB : NB / 2, panels = (end - begin + tiles - 1) / tiles;
  int64_t share = rows.tile_bytes / VECTOR_BYTES / passes * VECTOR_BYTES;  // bytes of a tile of the next panel for each pass
  bool alone = passes == 1 && (NB == 4 || end - begin < 8 * tiles);
  for (int64_t i = 0; i < panels; i++) {
    Panel panel = panel_of<NB>(p, begin + i, end, panels);
    for (int64_t pass = 0; pass < passes; pass++) {
      int64_t row = pass * each;
      Prefetch fetch{};
      if ((pass == 0 && i == 0) || alone)
        fetch = {PREFETCH_BYTES, rows.first == 0};
      else if (i + 1 < panels)
        fetch = {rows.tile_bytes + pass * share, passes};
      switch (min(each, rows.count - row)) {
#define ROWS(count) \
  case count: \
    rows.template multiply<(int)min(count, most), NB>(panel, row, fetch); \
    break;
        ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8)
#undef ROWS
      }
    }
  }
}

// Computes a product. With few rows, several tiles are computed at once, so that there are enough independent sums.
template <class Rows, class Kind>
static void with_vectors(const Kind& p, const Team& team) {
  constexpr int at_once = Rows::AT_ONCE;
  bool gated = p.gate >= 0;
  int64_t most = max(24, min(HELD_ROWS, HELD_BYTES / Rows::row_bytes(p) / 24 * 24)), begin, end;
  team.share((p.n + 15) / 16, gated ? 1 : 2, &begin, &end);
  for (int64_t first = 0; first < p.rows && begin < end; first += most) {
    Rows rows(p, first, min(most, p.rows - first), team);
    if (at_once >= 4 && 4 * rows.count <= at_once)
      multiply_block<at_once >= 4 ? 4 : 2>(p, rows, begin, end);
    else if (gated || at_once >= 16 || 2 * rows.count <= at_once)
      multiply_block<2>(p, rows, begin, end);
    else
      multiply_block<at_once >= 16 ? 2 : 1>(p, rows, begin, end);
  }
}

}  // namespace quire::ISA
