// The first products of adapters: h = scale * (A x) for each row of x, with the matrices A of the row's adapter.
//
// Rows are sorted by adapter, so that several of them use each vector of a matrix. The terms of a dot product are added in
// order, in the lanes of a vector, and then the lanes. So a number depends neither on other rows nor on threads, unless tile
// registers are used.
#include "low_rank.h"
#include "team.h"
#include "tile_registers.h"

namespace quire::ISA {

namespace {
constexpr int ROWS_AT_ONCE = REGISTER_BYTES == 64 ? 4 : REGISTER_BYTES == 32 ? 2 : 1;  // whose sums fit into registers
constexpr int RANKS_AT_ONCE = REGISTER_BYTES == 64 ? 4 : 2;
constexpr int64_t UNIT_ROWS = 64;  // rows and ranks that one thread computes
constexpr int64_t UNIT_RANKS = 4;
constexpr int64_t TILED_ROWS = 256;  // the same with tile registers
constexpr int64_t TILED_RANKS = 16;
constexpr int64_t TILES_FROM_ROWS = 4;  // of one adapter

// A step of a dot product: the next numbers of both rows.
template <class T>
struct Step;
template <>
struct Step<float> {
  static constexpr int64_t width = LANES;
  using Numbers = Vec;
  INLINE Numbers read(const float* p, int64_t n) { return load_some(p, n); }
  INLINE Vec dot(Vec acc, Numbers x, Numbers y) { return fma(x, y, acc); }
};
template <>
struct Step<bf16> {
  static constexpr int64_t width = 2 * LANES;
#if defined(__AVX512BF16__)
  using Numbers = UVec;
  INLINE Numbers of_pairs(UVec pairs) { return pairs; }
  INLINE Vec dot(Vec acc, Numbers x, Numbers y) {
    return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)x, (__m512bh)y);
  }
#else
  struct Numbers {
    Vec even, odd;
  };
  INLINE Numbers of_pairs(UVec pairs) { return {(Vec)(pairs << 16), (Vec)(pairs & 0xffff0000u)}; }
  INLINE Vec dot(Vec acc, const Numbers& x, const Numbers& y) { return fma(x.odd, y.odd, fma(x.even, y.even, acc)); }
#endif
  INLINE Numbers read(const bf16* p, int64_t n) {
    if (n >= width) return of_pairs(load_bits<UVec>(p));
    bf16 all[width] = {};
    memcpy(all, p, n * sizeof(bf16));
    return of_pairs(load_bits<UVec>(all));
  }
};

template <class T>
struct Rows {
  using Held = typename Term<T>::Held;

  const T* x;
  int64_t k, stride;  // stride: elements from row to row
  Held* h;
  int64_t width;
  const int32_t* order;  // rows, sorted by slot
};

// Ranks [rank, rank + ranks) of a matrix, for rows order[first], ..., order[first + rows - 1].
struct Unit {
  const LowRank* one;
  int64_t first, rows, rank, ranks;
};

// Computes MR rows and NR ranks. next: numbers of the matrix that are needed next.
template <class T, int MR, int NR>
static void multiply(const Rows<T>& all, const LowRank& one, int64_t first, int64_t rank, const T* next) {
  auto a = (const T*)one.a + rank * all.k;
  const T* x[MR];
  Vec sums[MR][NR] = {};
#pragma GCC unroll 4
  for (int m = 0; m < MR; m++) x[m] = all.x + all.order[first + m] * all.stride;
  auto add = [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    typename Step<T>::Numbers numbers[MR];
#pragma GCC unroll 4
    for (int m = 0; m < MR; m++) numbers[m] = Step<T>::read(x[m] + i, n);
#pragma GCC unroll 4
    for (int r = 0; r < NR; r++) {
      auto y = Step<T>::read(a + r * all.k + i, n);
      __builtin_prefetch(next + r * all.k + i, 0, 2);
#pragma GCC unroll 4
      for (int m = 0; m < MR; m++) sums[m][r] = Step<T>::dot(sums[m][r], numbers[m], y);
    }
  };
  int64_t i = 0;
  for (; i + Step<T>::width <= all.k; i += Step<T>::width) add(i, Step<T>::width);
  if (i < all.k) add(i, all.k - i);
#pragma GCC unroll 4
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
    for (int r = 0; r < NR; r++) {
      T value;
      put(&value, sum(sums[m][r]) * one.scale);
      hold(&value, all.h + all.order[first + m] * all.width + one.place + rank + r, 1);
    }
}

template <class T, int MR>
static void multiply_ranks(const Rows<T>& all, const Unit& unit, int64_t first, const T* next) {
  int64_t rank = unit.rank, end = unit.rank + unit.ranks;
  for (; rank + RANKS_AT_ONCE <= end; rank += RANKS_AT_ONCE) multiply<T, MR, RANKS_AT_ONCE>(all, *unit.one, first, rank, next);
  for (; rank < end; rank++) multiply<T, MR, 1>(all, *unit.one, first, rank, next);
}

#if defined(HAS_TILES)
constexpr bool HAS_TILES_HERE = true;

// Transposes 16 x 16 numbers.
INLINE void transpose(UInts (&rows)[16]) {
#pragma GCC unroll 4
  for (int apart = 1; apart < 16; apart *= 2) {
    IVec lane = lane_numbers(), is_odd = (lane & apart) != 0;  // 0 or -1
    IVec low = (is_odd & (lane + 16 - apart)) | (~is_odd & lane), high = (is_odd & (lane + 16)) | (~is_odd & (lane + apart));
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      if (i & apart) continue;
      UInts first = rows[i], second = rows[i + apart];
      rows[i] = (UInts)_mm512_permutex2var_epi32((__m512i)first, (__m512i)low, (__m512i)second);
      rows[i + apart] = (UInts)_mm512_permutex2var_epi32((__m512i)first, (__m512i)high, (__m512i)second);
    }
  }
}

// Numbers of x for tile registers: 16 rows from order[first] on, in place or copied to `memory`.
struct TileRows {
  const char* x;
  int64_t stride;  // bytes

  TileRows(const Rows<bf16>& all, int64_t first, int64_t rows, char* memory) {
    const int32_t* order = all.order + first;
    x = (const char*)(all.x + order[0] * all.stride);
    stride = all.stride * sizeof(bf16);
    if (rows == 16 && all.k % 32 == 0 && order[15] == order[0] + 15) return;
    x = memory;
    stride = up_to(all.k, 32) * sizeof(bf16) + 64;  // rarely a power of two
    for (int64_t i = 0; i < 16; i++) {
      char* out = memory + i * stride;
      int64_t bytes = i < rows ? all.k * sizeof(bf16) : 0;
      memcpy(out, all.x + order[i < rows ? i : 0] * all.stride, bytes);
      memset(out + bytes, 0, stride - bytes);
    }
  }
};
INLINE int64_t tiled_bytes(int64_t k) { return up_to(k, 32) * 32 + 2 * 16 * (up_to(k, 32) * 2 + 64); }

// Computes a unit with tile registers. next: numbers of the matrix that are needed next. memory: tiled_bytes(k).
static void multiply_tiled(const Rows<bf16>& all, const Unit& unit, const bf16* next, char* memory) {
  auto a = (const bf16*)unit.one->a + unit.rank * all.k;
  int64_t steps = up_to(all.k, 32) / 32, copied = 16 * (up_to(all.k, 32) * 2 + 64);
  char* copies = memory + steps * TILE_BYTES;
  for (int64_t s = 0; s < steps; s++) {
    UInts numbers[16];
    for (int64_t r = 0; r < unit.ranks; r++) __builtin_prefetch(next + r * all.k + s * 32, 0, 2);
    for (int64_t r = 0; r < 16; r++)
      numbers[r] = r < unit.ranks ? Step<bf16>::read(a + r * all.k + s * 32, all.k - s * 32) : UInts{};
    transpose(numbers);
    for (int64_t r = 0; r < 16; r++) store_bits(memory + s * TILE_BYTES + r * 64, numbers[r]);
  }
  begin_tiles();
  for (int64_t row = 0; row < unit.rows; row += 32) {
    alignas(64) float sums[32][16];
    int64_t first = unit.first + row, rows = min(32, unit.rows - row);
    TileRows one(all, first, min(16, rows), copies), two = one;
    if (rows > 16) two = TileRows(all, first + 16, rows - 16, copies + copied);
    bool has_next = row + 64 <= unit.rows;
    __asm__ volatile("" ::: "memory");  // GCC does not know that tiles are loaded from memory
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t s = 0; s < steps; s++) {
      _tile_loadd(6, memory + s * TILE_BYTES, 64);
      _tile_loadd(4, one.x + s * 64, one.stride);
      _tile_dpbf16ps(0, 4, 6);
      for (int64_t i = 0; i < 32 && has_next; i++)
        __builtin_prefetch((const char*)(all.x + all.order[first + 32 + i] * all.stride) + s * 64, 0, 2);
      if (rows <= 16) continue;
      _tile_loadd(5, two.x + s * 64, two.stride);
      _tile_dpbf16ps(1, 5, 6);
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[16], 64);
    for (int64_t i = 0; i < rows; i++)
      store_some(all.h + all.order[first + i] * all.width + unit.one->place + unit.rank,
                 load(sums[i]) * splat(unit.one->scale), unit.ranks);
  }
  _tile_release();
}
#else
constexpr bool HAS_TILES_HERE = false;
INLINE int64_t tiled_bytes(int64_t) { return 0; }
#endif

// next: the numbers of a matrix that this thread needs next. tiles: whether tile registers may be used, with `memory`.
template <class T>
static void compute(const Rows<T>& all, const Unit& unit, const T* next, [[maybe_unused]] bool tiles,
                    [[maybe_unused]] char* memory) {
  const LowRank& one = *unit.one;
  int64_t row = unit.first, end = unit.first + unit.rows;
#if defined(HAS_TILES)
  if constexpr (sizeof(T) == sizeof(bf16))
    if (tiles && unit.rows >= TILES_FROM_ROWS) {
      multiply_tiled(all, unit, next, memory);
      row = end;
    }
#endif
  for (; row + ROWS_AT_ONCE <= end; row += ROWS_AT_ONCE) multiply_ranks<T, ROWS_AT_ONCE>(all, unit, row, next);
  for (; row < end; row++) multiply_ranks<T, 1>(all, unit, row, next);
  if (unit.rank + unit.ranks < one.rank) return;
  T scale;
  put(&scale, one.scale);
  for (row = unit.first; row < end; row++)  // a bias is multiplied by the scale, and zeros by any number
    for (int64_t term = one.rank; term < one.terms; term++)
      hold(&scale, all.h + all.order[row] * all.width + one.place + term, 1);
}

// Sorts rows by slot, and returns where those of each slot begin: rows of slot s are order[starts[s]] to order[starts[s + 1]].
static void sort_rows(const int32_t* slots, int64_t rows, int64_t num_slots, int32_t* order, int32_t* starts) {
  memset(starts, 0, (num_slots + 2) * sizeof(int32_t));
  for (int64_t i = 0; i < rows; i++) starts[slots[i] + 1]++;
  for (int64_t s = 0; s <= num_slots; s++) starts[s + 1] += starts[s];
  for (int64_t i = 0; i < rows; i++) order[starts[slots[i]]++] = (int32_t)i;
  for (int64_t s = num_slots + 1; s > 0; s--) starts[s] = starts[s - 1];
  starts[0] = 0;
}

// Calls visit(unit) for all units, in the order of slots.
template <class F>
INLINE void each_unit(const LowRank* table, const int32_t* starts, int64_t num_slots, bool tiles, F visit) {
  int64_t rows = tiles ? TILED_ROWS : UNIT_ROWS, ranks = tiles ? TILED_RANKS : UNIT_RANKS;
  for (int64_t slot = 1; slot <= num_slots; slot++) {
    if (starts[slot] == starts[slot + 1]) continue;
    for (int64_t row = starts[slot]; row < starts[slot + 1]; row += rows)
      each_low_rank(table, slot, [&](const LowRank& one) {
        for (int64_t rank = 0; rank < one.rank; rank += ranks)
          visit(Unit{&one, row, min(rows, starts[slot + 1] - row), rank, min(ranks, one.rank - rank)});
      });
  }
}

// x (rows, k), slots int32 (rows,), table, h 32 bits (rows, width), dtype, rows, k, elements from row to row of x, slots,
// width, whether tile registers may be used
template <class T>
static void compute_all(const Arg* a, const Team& team) {
  auto slots = (const int32_t*)a[1].data;
  auto table = (const LowRank*)a[2].data;
  int64_t rows = a[5].integer, num_slots = a[8].integer, count = 0, begin, end, index = 0;
  bool tiles = HAS_TILES_HERE && sizeof(T) == sizeof(bf16) && a[10].integer && rows >= TILES_FROM_ROWS;
  int64_t sorted = up_to((rows + num_slots + 2) * sizeof(int32_t), 64);
  auto memory = (char*)team.scratch(sorted + (tiles ? tiled_bytes(a[6].integer) : 0)) + sorted;
  auto order = (int32_t*)(memory - sorted), starts = order + rows;
  Rows<T> all = {(const T*)a[0].data, a[6].integer, a[7].integer, (typename Term<T>::Held*)a[3].data, a[9].integer, order};
  sort_rows(slots, rows, num_slots, order, starts);
  each_unit(table, starts, num_slots, tiles, [&](const Unit&) { count++; });
  team.share(count, 1, &begin, &end);
  Unit before{};
  auto finish = [&](const T* next) {
    if (before.one != nullptr) compute(all, before, next, tiles, memory);
  };
  each_unit(table, starts, num_slots, tiles, [&](const Unit& unit) {
    if (index++ < begin || index > end) return;
    finish((const T*)unit.one->a + unit.rank * all.k);
    before = unit;
  });
  finish((const T*)(before.one ? before.one->a : 0));
}
}  // namespace

void low_rank(const Arg* a, const Team& team) { a[4].integer ? compute_all<bf16>(a, team) : compute_all<float>(a, team); }

}  // namespace quire::ISA
