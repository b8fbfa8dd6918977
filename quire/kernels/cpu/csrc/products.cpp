// Matrix products: x (rows, k) times a packed weight (n, k), in bf16 or float32.
//
// A tile (see products.h) has one vector for each step along k: float32 [k][16], or bf16 pairs of terms [k / 2][16][2]
// with k padded by zeros to a multiple of 32. The dot-product instructions read this layout, and 16 steps of bf16 are one
// AMX tile register, so one copy serves all builds.
// One thread adds the terms in order. So the result of a row depends neither on the values of other rows nor on
// threads, but on whether tile registers are used.
#include "product_tiles.h"
#include "products.h"
#include "terms.h"

namespace quire::ISA {

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

namespace {
// Rows of x in the type Held, in place if x has this type.
template <class T>
struct FloatRows {
  using Held = typename Term<T>::Held;
  static constexpr int AT_ONCE = VECTORS_AT_ONCE;
  static constexpr bool TILE_BY_TILE = REGISTER_BYTES < 64 && sizeof(T) != sizeof(Held);
  static constexpr int TILE_ROWS = AT_ONCE;

  const Product& p;
  int64_t first, count, tile_bytes;
  const Held* x;
  int64_t stride;

  static int64_t row_bytes(const Product& p) { return p.k * sizeof(Held); }

  FloatRows(const Product& p, int64_t first, int64_t count, const Team& team)
      : p(p), first(first), count(count), tile_bytes(steps_of<T>(p.k) * VECTOR_BYTES) {
    auto source = (const T*)p.x + first * p.x_stride;
    x = (const Held*)source;
    stride = p.x_stride;
    if (sizeof(T) == sizeof(Held)) return;
    stride = up_to(p.k, LANES) + LANES;  // rarely a power of two, so that rows do not share cache sets
    auto held = (Held*)team.scratch(count * stride * sizeof(Held));
    for (int64_t i = 0; i < count; i++) hold(source + i * p.x_stride, held + i * stride, p.k);
    x = held;
  }

  template <int MR, int NB>
  __attribute__((noinline)) void multiply(const Panel& panel, int64_t row, Prefetch fetch) const {
    if constexpr (MR * NB <= AT_ONCE) {
      Vec sums[MR][NB];
      add_tiles(sums, panel.tiles, row, fetch);
      finish_all<T>(p, panel, first + row, sums);
    } else {
      alignas(64) float sums[MR][NB][LANES];
      tile_by_tile(*this, panel, row, fetch, sums);
      finish_all<T>(p, panel, first + row, sums);
    }
  }

  // Computes the sums of NB tiles.
  template <int MR, int NB>
  INLINE_MEMBER void add_tiles(Vec (&sums)[MR][NB], const int64_t* tiles, int64_t row, Prefetch& fetch) const {
    constexpr int width = Term<T>::width;
    const Held* from = x + row * stride;
    int64_t steps = p.k / width;
    const char* w[NB];
    for (int n = 0; n < NB; n++) w[n] = p.weight + tiles[n] * tile_bytes;
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 8
      for (int n = 0; n < NB; n++) sums[m][n] = Vec{};
    for (int64_t s = 0; s < steps; s++) {
      fetch.step<true>(w);
      add_terms<Term<T>>(sums, from + s * width, stride, [&](int n) { return w[n] + s * VECTOR_BYTES; });
    }
  }
};

#if defined(HAS_TILES)
// A block of rows of x in bf16, for tile registers: see product_tiles.h.
template <bool GATED>
struct Bf16Block {
  struct Sums : TileSums {
    int64_t column, tiles[2];
    Vec bias[2];
    bool alone;  // whether there is no second tile
  };
  static constexpr bool in_place = true;

  const Product& p;
  BlockAdapters adapters;

  static int64_t steps(const Product& p) { return up_to(p.k, 32) / 32; }
  static int64_t unit(const Product&) { return 1; }
  static int64_t memory_bytes(const Product& p, int64_t rows, int64_t) { return BlockAdapters::bytes(p, rows); }
  Bf16Block(const Product& p, int64_t, int64_t, char* memory) : p(p), adapters(p, memory) {}

  void lay_out(int64_t row, int64_t count, const Part& part, char* a) {
    if (part.last) adapters.lay_out(row, count);
    for (int64_t i = 0; i < up_to(count, 16); i++) {
      char* out = a + i / 16 * part.bytes() + i % 16 * 64;
      const bf16* x = (const bf16*)p.x + (row + i) * p.x_stride + part.begin * 32;
      for (int64_t s = 0; s < part.end - part.begin; s++, out += TILE_BYTES) {
        int64_t left = i < count ? min(32, p.k - (part.begin + s) * 32) : 0;
        if (left == 32) {
          memcpy(out, x + s * 32, 64);
        } else {
          memset(out, 0, 64);
          memcpy(out, x + s * 32, left * sizeof(bf16));
        }
      }
    }
  }

  const char* weight(int64_t tile, const Part& part, int) const {
    return p.weight + (tile * steps(p) + part.begin) * TILE_BYTES;
  }

  template <bool BOTH>
  INLINE_MEMBER void multiply(const char* a, int64_t row, const Panel& panel, const Part& part,
                              Beside<Bf16Block>& beside, const float* from, float* to) {
    bool has_adapters = part.last && adapters.in_use;
    if (has_adapters && row == 0) adapters.begin(panel);
    auto add = [&] {
      if (has_adapters) adapters.add<BOTH>(row);
    };
    multiply_tiles<false, BOTH>(a, part.bytes(), 0, part.bytes(), beside, from, to, add);
  }

  INLINE_MEMBER void begin(Sums& sums, const Panel& panel) const {
    sums.column = panel.columns[0];
    for (int n = 0; n < 2; n++) sums.tiles[n] = panel.tiles[n];
    sums.alone = panel.columns[1] >= p.n;
    sums.bias[0] = bias_of<bf16>(p, sums.column, 0);
    sums.bias[1] = Vec{};
    if (!sums.alone) sums.bias[1] = GATED ? bias_of<bf16>(p, sums.column, 1) : bias_of<bf16>(p, sums.column + 16, 0);
  }

  INLINE_MEMBER void finish_row(Sums& sums) const {
    int64_t i = sums.done++;
    bf16* out = (bf16*)p.out + (sums.first + i) * p.out_stride + sums.column;
    int64_t left = p.n - sums.column;
    if (p.adapters.slots != nullptr && !adapters.in_use && i % FINISHED_ROWS == 0)
      add_adapters_to<bf16>(p, sums.tiles, sums, i);
    Vec x = load(sums.values[i / 16][0][i % 16]) + sums.bias[0];
    Vec y = load(sums.values[i / 16][1][i % 16]) + sums.bias[1];
    if (GATED) return store_some(out, activate((Activation)p.gate, rounded<bf16>(x)) * rounded<bf16>(y), left);
    if (left >= 32) return store_two(out, x, y);
    store_some(out, x, left);
    if (!sums.alone) store_some(out + 16, y, left - 16);
  }
};
#endif
}  // namespace

void multiply(const Product& p, bool is_bf16, [[maybe_unused]] bool tiles, const Team& team) {
#if defined(HAS_TILES)
  if (is_bf16 && tiles && p.rows > TILES_FROM_ROWS)
    return p.gate < 0 ? with_tiles<Bf16Block<false>>(p, team) : with_tiles<Bf16Block<true>>(p, team);
#endif
  is_bf16 ? with_vectors<FloatRows<bf16>>(p, team) : with_vectors<FloatRows<float>>(p, team);
}

// x, weight, bias, out, dtype, the sizes of `product_of`, whether tile registers may be used, the numbers of `adapters_of`
void linear(const Arg* a, const Team& team) {
  Product p = product_of(a, a + 1, a + 2, a + 3, a + 5);
  p.adapters = adapters_of(a + 12);
  multiply(p, a[4].integer, a[11].integer, team);
}

}  // namespace quire::ISA
