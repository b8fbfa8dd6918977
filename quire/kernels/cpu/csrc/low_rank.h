// Adapters (LoRA) in products: each row of x may have an adapter, which adds the products of a few numbers h of the row with
// matrices of the adapter to columns of the output.
//
// The numbers are computed before the product: see low_rank.cpp. Their products are added to the sums of the weight
// before these are written, in the order of matrices and terms. So the result of a row does not depend on other rows, unless
// tile registers are used: see BlockAdapters.
#pragma once
#include "terms.h"

namespace quire::ISA {

// The matrices of an adapter for some rows of a weight. All zeros: none.
struct LowRank {
  int64_t a;           // address: (rank, k), row by row
  int64_t b;           // address: tiles [first, end) of the weight; float32 [terms][16], or bf16 [terms / 2][16][2]
  int64_t rank;        // rows of `a`
  int64_t terms;       // columns of `b`, an even number: the rank, perhaps a bias, perhaps zeros
  int64_t place;       // of its numbers among those of a row
  int64_t first, end;  // tiles
  float scale;         // of the numbers
  int32_t is_finite;   // whether `b` has no NaN and no infinity

  bool has(int64_t tile) const { return tile >= first && tile < end; }
};
constexpr int64_t LOW_RANKS = 8;  // for each adapter and weight; unused ones are behind the others

// The adapters of the rows of a product.
struct Adapters {
  const int32_t* slots;   // of rows, 0: none. Null: no row has an adapter
  const LowRank* table;   // [slots][LOW_RANKS]
  const char* h;          // Held of Term [rows][width]
  int64_t width, before;  // before: tiles of the weight in front of those of the product
};

// Calls visit(matrices) for each of a slot.
template <class F>
INLINE void each_low_rank(const LowRank* table, int64_t slot, F visit) {
  const LowRank* one = table + slot * LOW_RANKS;
  for (int64_t i = 0; i < LOW_RANKS && one[i].terms; i++) visit(one[i]);
}

// Sums of rows and tiles in memory: those of row m and tile n at sums + m * row_stride + n * tile_stride.
struct SumsAt {
  float* sums;
  int64_t row_stride, tile_stride;

  INLINE_MEMBER float* of(int64_t m, int64_t n) const { return sums + m * row_stride + n * tile_stride; }
  INLINE_MEMBER SumsAt from(int64_t m, int64_t n) const { return {of(m, n), row_stride, tile_stride}; }
};

// Adds to the sums of MR rows with the same adapter and N tiles. h: of the first row.
template <class T, int MR, int N>
INLINE void add_matrices(const LowRank& one, const typename Term<T>::Held* h, int64_t width, const int64_t (&tiles)[N],
                         SumsAt at) {
  int64_t steps = one.terms / Term<T>::width;
  const char* b[N];
  Vec sums[MR][N];
#pragma GCC unroll 4
  for (int n = 0; n < N; n++) b[n] = (const char*)one.b + (tiles[n] - one.first) * steps * 64;
#pragma GCC unroll 8
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) sums[m][n] = load(at.of(m, n));
  for (int64_t s = 0; s < steps; s++) {
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) __builtin_prefetch(b[n] + (steps + s) * 64, 0, 2);  // the next tile
    add_terms<Term<T>>(sums, h + s * Term<T>::width, width, [&](int n) { return b[n] + s * 64; });
  }
#pragma GCC unroll 8
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) store(at.of(m, n), sums[m][n]);
}

// The same for as many rows at once as registers have room for.
template <class T, int MR, int N>
INLINE void add_to_rows(const LowRank& one, const typename Term<T>::Held* h, int64_t width, const int64_t (&tiles)[N],
                        SumsAt at) {
  constexpr int most = (int)max(1, min(MR, VECTORS_AT_ONCE / N));
  int m = 0;
  for (; m + most <= MR; m += most) add_matrices<T, most, N>(one, h + m * width, width, tiles, at.from(m, 0));
  for (; m < MR; m++) add_matrices<T, 1, N>(one, h + m * width, width, tiles, at.from(m, 0));
}

// The same for those of the tiles that the matrices have.
template <class T, int MR, int N>
INLINE void add_to_tiles(const LowRank& one, const typename Term<T>::Held* h, int64_t width, const int64_t (&tiles)[N],
                         SumsAt at) {
  int inside = 0;
  for (int n = 0; n < N; n++) inside += one.has(tiles[n]);
  if (inside == N) return add_to_rows<T, MR, N>(one, h, width, tiles, at);
  for (int n = 0; n < N && inside; n++)
    if (one.has(tiles[n])) add_to_rows<T, MR, 1>(one, h, width, {tiles[n]}, at.from(0, n));
}

// Additions to the sums of a row and a tile.
template <class T>
struct Addition {
  float* sums;
  const typename Term<T>::Held* h;
  const char* b;
  int64_t steps;

  INLINE_MEMBER void step(Vec (&acc)[1][1], int64_t s) const {
    __builtin_prefetch(b + (steps + s) * 64, 0, 2);  // the next tile
    add_terms<Term<T>>(acc, h + s * Term<T>::width, 0, [&](int) { return b + s * 64; });
  }
};

// Additions of several adapters to different sums. They take turns, because each waits for its step before.
template <class T>
struct Additions {
  static constexpr int MOST = REGISTER_BYTES == 64 ? 4 : REGISTER_BYTES == 32 ? 2 : 1;

  Addition<T> all[MOST];
  int count = 0;

  INLINE_MEMBER void append(const Addition<T>& one) {
    if (count == MOST || (MOST > 1 && count && all[count - 1].sums == one.sums)) finish();
    all[count++] = one;
  }

  void finish() {
    Vec acc[MOST][1][1];
    int64_t common = 0;
    if (count == MOST) {
      common = all[0].steps;
      for (int i = 1; i < MOST; i++) common = min(common, all[i].steps);
    }
    for (int i = 0; i < count; i++) acc[i][0][0] = load(all[i].sums);
    for (int64_t s = 0; s < common; s++)
#pragma GCC unroll 4
      for (int i = 0; i < MOST; i++) all[i].step(acc[i], s);
#pragma GCC unroll 4
    for (int i = 0; i < MOST; i++) {
      if (i >= count) break;
      for (int64_t s = common; s < all[i].steps; s++) all[i].step(acc[i], s);
      store(all[i].sums, acc[i][0][0]);
    }
    count = 0;
  }
};

// Adds to the sums of MR rows from `row` on and NB tiles. gated: whether gate and up tiles alternate.
template <class T, int MR, int NB>
static __attribute__((noinline)) void add_adapters(const Adapters& adapters, const int64_t (&tiles)[NB], bool gated,
                                                   int64_t row, SumsAt at) {
  const int32_t* slots = adapters.slots + row;
  auto h = (const typename Term<T>::Held*)adapters.h + row * adapters.width;
  int64_t all[NB], halves[2][(NB + 1) / 2];
  for (int n = 0; n < NB; n++) all[n] = halves[n % 2][n / 2] = tiles[n] + adapters.before;
  bool same = true;
  for (int m = 1; m < MR; m++) same = same && slots[m] == slots[0];
  if (same) {
    if (slots[0] == 0) return;
    return each_low_rank(adapters.table, slots[0], [&](const LowRank& one) {
      if (NB == 1 || !gated) return add_to_tiles<T, MR>(one, h + one.place, adapters.width, all, at);
      SumsAt apart = {at.sums, at.row_stride, 2 * at.tile_stride};
      add_to_tiles<T, MR>(one, h + one.place, adapters.width, halves[0], apart);
      apart.sums = at.of(0, 1);
      add_to_tiles<T, MR>(one, h + one.place, adapters.width, halves[1], apart);
    });
  }
  Additions<T> additions;
  for (int m = 0; m < MR; m++) {
    if (slots[m] == 0) continue;
    for (int n = 0; n < NB; n++)
      each_low_rank(adapters.table, slots[m], [&](const LowRank& one) {
        int64_t steps = one.terms / Term<T>::width;
        if (!one.has(all[n])) return;
        additions.append({at.of(m, n), h + m * adapters.width + one.place,
                          (const char*)one.b + (all[n] - one.first) * steps * 64, steps});
      });
  }
  additions.finish();
}

}  // namespace quire::ISA
