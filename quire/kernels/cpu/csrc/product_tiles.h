// Products with AMX: 16 rows of x times 16 rows of the weight at once, 64 bytes of each.
//
// Sums of 32 rows and 32 columns stay in four registers over all of k. Operands are loaded from the L2 cache, which is
// fast enough: a block of x stays there while all columns are computed. If k is so long that only few rows would fit,
// and the weight would be read too often, a block has a part of k, and the sums are stored in memory between parts.
#pragma once
#include "products.h"
#include "tile_registers.h"

namespace quire::ISA {

constexpr int64_t TILES_FROM_ROWS = 4;  // up to so many rows, vectors are as fast as memory
constexpr int64_t AHEAD = 16 * TILE_BYTES;
constexpr int64_t BLOCK_BYTES = 5 << 18;  // of x
constexpr int64_t BLOCK_ROWS = 256;       // of x: target rows of a block

// A part of k, in steps of a register. sums: memory for the sums of all columns and rows between parts.
struct Part {
  int64_t begin, end;
  bool first, last;
  char* sums;

  int64_t bytes() const { return (end - begin) * TILE_BYTES; }  // of 16 rows, or a tile of columns
};

// Sums of up to 32 rows and two tiles of columns that are not yet written to the output.
struct TileSums {
  alignas(64) float values[2][2][16][16];  // [row / 16][tile][row % 16][column], or integers
  int64_t first, rows, done;
};

constexpr int64_t FINISHED_ROWS = 8;  // whose adapters are added at once

// Adds what adapters add to the sums of rows i, ..., i + FINISHED_ROWS - 1. tiles: of the panel.
template <class T>
static __attribute__((noinline)) void add_adapters_to(const Product& p, const int64_t (&tiles)[2], TileSums& sums, int64_t i) {
  bool gated = p.gate >= 0;
  auto at = [&](int64_t row) { return SumsAt{sums.values[row / 16][0][row % 16], 16, 16 * 16}; };
  if (i + FINISHED_ROWS <= sums.rows)
    return add_adapters<T, FINISHED_ROWS, 2>(p.adapters, tiles, gated, sums.first + i, at(i));
  for (; i < sums.rows; i++) add_adapters<T, 1, 2>(p.adapters, tiles, gated, sums.first + i, at(i));
}

// A kind of products (a Product, perhaps with more fields) has a class Block, a block of rows of x:
//
//   Sums                          TileSums, and what finish_row needs
//   steps(p), unit(p)             steps of k; parts of k have a multiple of `unit` steps
//   memory_bytes(p, rows, steps)  of memory for a block of so many rows and parts of so many steps
//   Block(p, rows, steps, memory)
//   lay_out(row, count, part, a)  copies rows [row, row + count) of x to `a`: [rows / 16][steps][16][64], zeros behind
//   weight(tile, part, place)     the steps of a tile of the weight: [steps][16][64]; place: 0 or 1 in the panel
//   in_place                      whether `weight` copies nothing, so that later tiles can be prefetched
//   multiply<BOTH>(a, row, panel, part, beside, from, to)  calls multiply_tiles; row: the first one, in the block
//   begin(sums, panel)            comes before the first finish_row
//   finish_row(sums)              writes the next row to the output

// Work that the loops below interleave with their products, at no cost: write the previous sums to the output, and
// prefetch the next tiles of the weight, cache lines [from, to) of each.
template <class Block>
struct Beside {
  const Block& block;
  typename Block::Sums* before;
  const char* w[2];     // the current tiles of columns
  const char* next[2];  // the next ones, or null
  int64_t size, ahead;  // bytes of a tile of columns; prefetch distance in bytes, at most `size`
  int64_t from, to;

  INLINE_MEMBER void step(int64_t at) {
    if (before != nullptr && before->done < before->rows) block.finish_row(*before);
    int64_t left = at + ahead - size;
    const char* const* where = left < 0 ? w : next;
    if (where[0] == nullptr) return;
    int64_t place = left < 0 ? at + ahead : left;
    for (int64_t line = from; line < to; line++) {
      __builtin_prefetch(where[0] + place + line * 64, 0, 2);
      __builtin_prefetch(where[1] + place + line * 64, 0, 2);
    }
  }
};

// Bytes [begin, end) of the tiles `a` and `a + a_tile` of x (the first alone if not BOTH), times two tiles of the weight,
// plus the sums `from` unless null, written to `to`: [4][16][16]. CODES: signed times unsigned bytes, otherwise bf16.
// add(): adds more to the sums in registers 0 to 3.
template <bool CODES, bool BOTH, class Beside, class Add>
INLINE void multiply_tiles(const char* a, int64_t a_tile, int64_t begin, int64_t end, Beside& beside, const float* from,
                           float* to, Add add) {
#define DOT(to, a, b) \
  if constexpr (CODES) \
    _tile_dpbsud(to, a, b); \
  else \
    _tile_dpbf16ps(to, a, b)
  const char *w0 = beside.w[0], *w1 = beside.w[1];
  __asm__ volatile("" ::: "memory");  // GCC does not know that tiles are loaded from memory
  if (from != nullptr) {
    _tile_loadd(0, from, 64);
    _tile_loadd(1, from + 256, 64);
    if (BOTH) {
      _tile_loadd(2, from + 512, 64);
      _tile_loadd(3, from + 768, 64);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if (BOTH) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  for (int64_t at = begin; at < end; at += TILE_BYTES) {
    _tile_loadd(4, a + at, 64);
    _tile_loadd(6, w0 + at, 64);
    DOT(0, 4, 6);
    _tile_loadd(7, w1 + at, 64);
    DOT(1, 4, 7);
    if (BOTH) {
      _tile_loadd(5, a + a_tile + at, 64);
      DOT(2, 5, 6);
      DOT(3, 5, 7);
    }
    beside.step(at);
  }
  add();
  _tile_stored(0, to, 64);
  _tile_stored(1, to + 256, 64);
  if (BOTH) {
    _tile_stored(2, to + 512, 64);
    _tile_stored(3, to + 768, 64);
  }
#undef DOT
}

// The adapters of a block of rows in bf16, if they are few: their matrices are more steps of the tile registers. The numbers h
// of a row are zeros in the steps of other adapters, whose matrices are finite.
struct BlockAdapters {
  static constexpr int64_t MOST_SLOTS = 8;
  static constexpr int64_t MOST_STEPS = 24;  // each of 32 terms, of all adapters together

  const Adapters& adapters;
  bool gated;
  char *b, *h;  // [steps of the panel][2][16][64], [rows / 16][steps][16][64]
  bool in_use = false;
  int64_t num_slots = 0, steps = 0, count = 0;  // count: steps of the panel
  int64_t slots[MOST_SLOTS], starts[MOST_SLOTS];  // starts: the first step of each slot
  int64_t places[MOST_STEPS];  // of the panel's steps among all

  static int64_t bytes(const Product& p, int64_t rows) {
    return p.adapters.slots == nullptr ? 0 : (rows / 16 + 2) * MOST_STEPS * TILE_BYTES;
  }

  BlockAdapters(const Product& p, char* memory)
      : adapters(p.adapters), gated(p.gate >= 0), b(memory), h(memory + 2 * MOST_STEPS * TILE_BYTES) {}

  // The index of a slot, or `num_slots`.
  int64_t find(int64_t slot) const {
    int64_t i = 0;
    while (i < num_slots && slots[i] != slot) i++;
    return i;
  }

  // Returns whether tile registers can have the adapters.
  bool collect(int64_t row, int64_t rows) {
    num_slots = steps = 0;
    for (int64_t i = 0; i < rows; i++) {
      int64_t slot = adapters.slots[row + i];
      if (slot == 0 || find(slot) < num_slots) continue;
      if (num_slots == MOST_SLOTS) return false;
      slots[num_slots] = slot;
      starts[num_slots++] = steps;
      bool is_finite = true;
      each_low_rank(adapters.table, slot, [&](const LowRank& one) {
        steps += up_to(one.terms, 32) / 32;
        is_finite = is_finite && one.is_finite;
      });
      if (steps > MOST_STEPS || !is_finite) return false;
    }
    return true;
  }

  void lay_out(int64_t row, int64_t rows) {
    in_use = adapters.slots != nullptr && collect(row, rows);
    if (!in_use || steps == 0) return;
    memset(h, 0, up_to(rows, 16) / 16 * steps * TILE_BYTES);
    for (int64_t i = 0; i < rows; i++) {
      int64_t slot = adapters.slots[row + i];
      if (slot == 0) continue;
      char* out = h + (i / 16 * steps + starts[find(slot)]) * TILE_BYTES + i % 16 * 64;
      each_low_rank(adapters.table, slot, [&](const LowRank& one) {
        auto from = (const bf16*)adapters.h + (row + i) * adapters.width + one.place;
        for (int64_t term = 0; term < one.terms; term += 32, out += TILE_BYTES)
          memcpy(out, from + term, min(32, one.terms - term) * sizeof(bf16));
      });
    }
  }

  // Copies the matrices for two tiles of the weight, and prefetches those for the next two.
  void begin(const Panel& panel) {
    count = 0;
    for (int64_t i = 0; i < num_slots; i++) {
      int64_t place = starts[i];
      each_low_rank(adapters.table, slots[i], [&](const LowRank& one) {
        int64_t first = panel.tiles[0] + adapters.before, second = panel.tiles[1] + adapters.before;
        int64_t size = up_to(one.terms, 32) / 32;
        for (int64_t s = 0; s < size && (one.has(first) || one.has(second)); s++) {
          copy(one, first, s, b + count * 2 * TILE_BYTES);
          copy(one, second, s, b + (count * 2 + 1) * TILE_BYTES);
          places[count++] = place + s;
        }
        place += size;
      });
    }
  }

  INLINE_MEMBER void copy(const LowRank& one, int64_t tile, int64_t step, char* out) const {
    int64_t bytes = one.has(tile) ? min(32, one.terms - step * 32) * 32 : 0, tile_bytes = one.terms * 32;
    const char* from = (const char*)one.b + (tile - one.first) * tile_bytes + step * TILE_BYTES;
    for (int64_t i = 0; i < bytes; i += 64) {
      store_bits(out + i, load_bits<UVec>(from + i));
      __builtin_prefetch(from + (gated ? 1 : 2) * tile_bytes + i, 0, 2);
    }
    for (int64_t i = bytes; i < TILE_BYTES; i += 64) store_bits(out + i, UVec{});
  }

  // Adds to registers 0 to 3, for 16 rows or 32. row: the first one, in the block.
  template <bool BOTH>
  INLINE_MEMBER void add(int64_t row) const {
    const char* from = h + row / 16 * steps * TILE_BYTES;
    for (int64_t i = 0; i < count; i++) {
      const char* a = from + places[i] * TILE_BYTES;
      _tile_loadd(4, a, 64);
      _tile_loadd(6, b + i * 2 * TILE_BYTES, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + (i * 2 + 1) * TILE_BYTES, 64);
      _tile_dpbf16ps(1, 4, 7);
      if (!BOTH) continue;
      _tile_loadd(5, a + steps * TILE_BYTES, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
};

// Rows [row, row + rows), tiles of columns [begin, end) and a part of k, by one thread.
template <class Block, class Kind>
static void tiled_block(const Kind& p, Block& block, int64_t row, int64_t rows, int64_t begin, int64_t end,
                        const Part& part, char* a) {
  int64_t a_tile = part.bytes(), w_tile = Block::steps(p) * TILE_BYTES, wide = p.gate < 0 ? 2 : 1;
  int64_t pieces = (rows + 31) / 32;
  int64_t ahead = pieces == 1 ? min(a_tile, AHEAD) : a_tile;  // with many rows, all of the next tiles are prefetched
  typename Block::Sums sums[2], *before = nullptr;
  int turn = 0;
  float* waiting = (float*)part.sums;
  block.lay_out(row, rows, part, a);
  for (int64_t tile = begin; tile < end; tile += wide) {
    Panel panel = panel_of<2>(p, tile, end);
    const char *w0 = block.weight(panel.tiles[0], part, 0), *w1 = block.weight(panel.tiles[1], part, 1);
    bool next = tile + wide < end && block.in_place;
    for (int64_t i = 0; i < pieces; i++, waiting += 1024) {
      const char* some = a + i * 2 * a_tile;
      auto& now = sums[turn];
      Beside<Block> beside = {block,  before, {w0, w1},        {nullptr, nullptr},
                              a_tile, ahead,  i * 16 / pieces, (i + 1) * 16 / pieces};
      if (next) {
        beside.next[0] = w0 + wide * w_tile;
        beside.next[1] = w1 + wide * w_tile;
      }
      const float* from = part.first ? nullptr : waiting;
      float* to = part.last ? now.values[0][0][0] : waiting;
      if (rows - i * 32 <= 16)
        block.template multiply<false>(some, i * 32, panel, part, beside, from, to);
      else
        block.template multiply<true>(some, i * 32, panel, part, beside, from, to);
      if (!part.last) continue;
      while (before != nullptr && before->done < before->rows) block.finish_row(*before);
      now.first = row + i * 32;
      now.rows = min(32, rows - i * 32);
      now.done = 0;
      block.begin(now, panel);
      before = &now;
      turn ^= 1;
    }
  }
  while (before != nullptr && before->done < before->rows) block.finish_row(*before);
}

// Threads divide rows if there are many, otherwise columns.
template <class Block, class Kind>
static void with_tiles(const Kind& p, const Team& team) {
  int64_t by_rows = team.size, steps = Block::steps(p), unit = Block::unit(p), begin, end, first, last;
  while (by_rows > 1 && (team.size % by_rows || p.rows < 128 * by_rows)) by_rows--;
  int64_t by_columns = team.size / by_rows;
  Team rows_team = {team.shared, (int)(team.rank / by_columns), (int)by_rows};
  Team columns_team = {team.shared, (int)(team.rank % by_columns), (int)by_columns};
  rows_team.share(p.rows, 32, &first, &last);
  columns_team.share((p.n + 15) / 16, p.gate >= 0 ? 1 : 2, &begin, &end);
  if (first >= last || begin >= end) return;

  int64_t wanted = min(BLOCK_ROWS, up_to(last - first, 32));
  int64_t parts = max(1, (wanted * steps * 64 + BLOCK_BYTES - 1) / BLOCK_BYTES);
  int64_t each_part = up_to((steps + parts - 1) / parts, unit);
  int64_t most = max(32, BLOCK_BYTES / (each_part * 64) / 32 * 32);
  int64_t blocks = (last - first + most - 1) / most;
  int64_t each = up_to((last - first + blocks - 1) / blocks, 32);
  int64_t panels = p.gate >= 0 ? end - begin : (end - begin + 1) / 2;
  int64_t x_bytes = each / 16 * each_part * TILE_BYTES, waiting = each_part < steps ? panels * (each / 32) * 4096 : 0;
  char* a = (char*)team.scratch(x_bytes + waiting + Block::memory_bytes(p, each, each_part));
  Block block(p, each, each_part, a + x_bytes + waiting);
  begin_tiles();
  for (int64_t row = first; row < last; row += each) {
    int64_t rows = min(each, last - row);
    for (int64_t step = 0; step < steps; step += each_part) {
      int64_t behind = min(steps, step + each_part);
      tiled_block(p, block, row, rows, begin, end, {step, behind, step == 0, behind == steps, a + x_bytes}, a);
    }
  }
  _tile_release();
}

}  // namespace quire::ISA
