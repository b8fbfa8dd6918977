// The part of products.cpp that uses AMX: 16 rows of x times 16 rows of the weight, 32 terms at once.
//
// Sums of 32 rows and 32 columns stay in four registers over all of k. Operands are loaded from the L2 cache, which is
// fast enough: a block of x stays there while all columns are computed. If k is so long that only few rows would fit,
// and the weight would be read too often, a block has a part of k, and the sums are stored in memory between parts.

constexpr int64_t TILES_FROM_ROWS = 4;  // up to so many rows, vectors are as fast as memory
constexpr int64_t TILE_BYTES = 1024;
constexpr int64_t AHEAD = 16 * TILE_BYTES;
constexpr int64_t BLOCK_BYTES = 5 << 18;  // of x
constexpr int64_t BLOCK_ROWS = 256;       // of x: target rows of a block

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// A part of k, in steps of 32 terms. sums: memory for the sums of all columns and rows between parts.
struct Part {
  int64_t begin, end;
  bool first, last;
  char* sums;
};

// Copies rows [row, row + count) of x to the layout of tile registers, [rows / 16][steps][16][32], padded with zeros.
static void lay_out(const Product& p, int64_t row, int64_t count, const Part& part, char* target) {
  int64_t steps = part.end - part.begin;
  for (int64_t i = 0; i < up_to(count, 16); i++) {
    char* out = target + i / 16 * steps * TILE_BYTES + i % 16 * 64;
    const bf16* x = (const bf16*)p.x + (row + i) * p.x_stride + part.begin * 32;
    for (int64_t s = 0; s < steps; s++, out += TILE_BYTES) {
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

// Sums of up to 32 rows and two tiles of columns that are not yet written to the output.
struct Sums {
  alignas(64) float values[2][2][16][16];  // [row / 16][tile][row % 16][column]
  int64_t first, rows, done;
  int64_t column;
  Vec bias[2];
  bool alone;  // whether there is no second tile
};

template <bool GATED>
INLINE void finish_row(const Product& p, Sums& sums) {
  int64_t i = sums.done++;
  bf16* out = (bf16*)p.out + (sums.first + i) * p.out_stride + sums.column;
  int64_t left = p.n - sums.column;
  Vec x = load(sums.values[i / 16][0][i % 16]) + sums.bias[0];
  Vec y = load(sums.values[i / 16][1][i % 16]) + sums.bias[1];
  if (GATED) return store_some(out, activate((Activation)p.gate, rounded<bf16>(x)) * rounded<bf16>(y), left);
  if (left >= 32) return store_two(out, x, y);
  store_some(out, x, left);
  if (!sums.alone) store_some(out + 16, y, left - 16);
}

// Work that the loops below interleave with their products, at no cost: write the previous sums to the output, and
// prefetch the next tiles of the weight, cache lines [from, to) of each.
template <bool GATED>
struct Beside {
  const Product& p;
  Sums* before;
  const char* w[2];      // the current tiles of columns
  const char* next[2];   // the next ones, or null
  int64_t size, ahead;   // bytes of a tile of columns; prefetch distance in bytes, at most `size`
  int64_t from, to;

  __attribute__((always_inline)) inline void step(int64_t at) {
    if (before != nullptr && before->done < before->rows) finish_row<GATED>(p, *before);
    int64_t left = at + ahead - size;
    const char* const* where = left < 0 ? w : next;
    if (where[0] == nullptr) return;
    int64_t place = left < 0 ? at + ahead : left;
    for (int64_t line = from; line < to; line++) {
      _mm_prefetch(where[0] + place + line * 64, _MM_HINT_T1);
      _mm_prefetch(where[1] + place + line * 64, _MM_HINT_T1);
    }
  }
};

// 32 rows of x times two tiles of the weight, plus the sums `from` unless null, written to `to`: [4][16][16].
template <bool GATED>
INLINE void two_by_two(const char* a, int64_t a_tile, Beside<GATED> beside, const float* from, float* to) {
  const char *w0 = beside.w[0], *w1 = beside.w[1];
  if (from != nullptr) {
    _tile_loadd(0, from, 64);
    _tile_loadd(1, from + 256, 64);
    _tile_loadd(2, from + 512, 64);
    _tile_loadd(3, from + 768, 64);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t at = 0; at < a_tile; at += TILE_BYTES) {
    _tile_loadd(4, a + at, 64);
    _tile_loadd(6, w0 + at, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w1 + at, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + a_tile + at, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    beside.step(at);
  }
  _tile_stored(0, to, 64);
  _tile_stored(1, to + 256, 64);
  _tile_stored(2, to + 512, 64);
  _tile_stored(3, to + 768, 64);
}

// Like two_by_two for 16 rows of x.
template <bool GATED>
INLINE void one_by_two(const char* a, int64_t a_tile, Beside<GATED> beside, const float* from, float* to) {
  const char *w0 = beside.w[0], *w1 = beside.w[1];
  if (from != nullptr) {
    _tile_loadd(0, from, 64);
    _tile_loadd(1, from + 256, 64);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  for (int64_t at = 0; at < a_tile; at += TILE_BYTES) {
    _tile_loadd(4, a + at, 64);
    _tile_loadd(6, w0 + at, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w1 + at, 64);
    _tile_dpbf16ps(1, 4, 7);
    beside.step(at);
  }
  _tile_stored(0, to, 64);
  _tile_stored(1, to + 256, 64);
}

// Rows [row, row + rows), tiles of columns [begin, end) and a part of k, by one thread.
template <bool GATED>
static void tiled_block(const Product& p, int64_t row, int64_t rows, int64_t begin, int64_t end, const Part& part, char* a) {
  int64_t a_tile = (part.end - part.begin) * TILE_BYTES, w_tile = up_to(p.k, 32) / 32 * TILE_BYTES, wide = GATED ? 1 : 2;
  int64_t pieces = (rows + 31) / 32;
  int64_t ahead = pieces == 1 ? min(a_tile, AHEAD) : a_tile;  // with many rows, all of the next tiles are prefetched
  Sums sums[2];
  Sums* before = nullptr;
  int turn = 0;
  float* waiting = (float*)part.sums;
  lay_out(p, row, rows, part, a);
  for (int64_t tile = begin; tile < end; tile += wide) {
    Panel panel = panel_of<2>(p, tile, end);
    bool alone = !GATED && tile + 1 == end;
    int64_t column = panel.columns[0];
    Vec first = bias_of<bf16>(p, column, 0), second{};
    if (!alone) second = GATED ? bias_of<bf16>(p, column, 1) : bias_of<bf16>(p, column + 16, 0);
    const char* w0 = p.weight + panel.tiles[0] * w_tile + part.begin * TILE_BYTES;
    const char* w1 = p.weight + panel.tiles[1] * w_tile + part.begin * TILE_BYTES;
    for (int64_t i = 0; i < pieces; i++, waiting += 1024) {
      const char* some = a + i * 2 * a_tile;
      Sums& now = sums[turn];
      bool last = tile + wide >= end;
      Beside<GATED> beside = {p,      before, {w0, w1},        {nullptr, nullptr},
                              a_tile, ahead,  i * 16 / pieces, (i + 1) * 16 / pieces};
      if (!last) {
        beside.next[0] = w0 + wide * w_tile;
        beside.next[1] = w1 + wide * w_tile;
      }
      const float* from = part.first ? nullptr : waiting;
      float* to = part.last ? now.values[0][0][0] : waiting;
      if (rows - i * 32 <= 16)
        one_by_two<GATED>(some, a_tile, beside, from, to);
      else
        two_by_two<GATED>(some, a_tile, beside, from, to);
      if (!part.last) continue;
      while (before != nullptr && before->done < before->rows) finish_row<GATED>(p, *before);
      now.first = row + i * 32;
      now.rows = min(32, rows - i * 32);
      now.done = 0;
      now.column = column;
      now.bias[0] = first;
      now.bias[1] = second;
      now.alone = alone;
      before = &now;
      turn ^= 1;
    }
  }
  while (before != nullptr && before->done < before->rows) finish_row<GATED>(p, *before);
}

// Threads divide rows if there are many, otherwise columns.
static void with_tiles(const Product& p, const Team& team) {
  int64_t by_rows = team.size, steps = up_to(p.k, 32) / 32, begin, end, first, last;
  while (by_rows > 1 && (team.size % by_rows || p.rows < 128 * by_rows)) by_rows--;
  int64_t by_columns = team.size / by_rows;
  Team rows_team = {team.shared, (int)(team.rank / by_columns), (int)by_rows};
  Team columns_team = {team.shared, (int)(team.rank % by_columns), (int)by_columns};
  rows_team.share(p.rows, 32, &first, &last);
  columns_team.share((p.n + 15) / 16, p.gate >= 0 ? 1 : 2, &begin, &end);
  if (first >= last || begin >= end) return;

  int64_t wanted = min(BLOCK_ROWS, up_to(last - first, 32));
  int64_t parts = max(1, (wanted * steps * 64 + BLOCK_BYTES - 1) / BLOCK_BYTES), each_part = (steps + parts - 1) / parts;
  int64_t most = max(32, BLOCK_BYTES / (each_part * 64) / 32 * 32);
  int64_t blocks = (last - first + most - 1) / most;
  int64_t each = up_to((last - first + blocks - 1) / blocks, 32);
  int64_t panels = p.gate >= 0 ? end - begin : (end - begin + 1) / 2;
  int64_t waiting = each_part < steps ? panels * (each / 32) * 4096 : 0;
  char* a = (char*)team.scratch(each / 16 * each_part * TILE_BYTES + waiting);
  static const TileConfig config;
  _tile_loadconfig(&config);
  for (int64_t row = first; row < last; row += each) {
    int64_t rows = min(each, last - row);
    for (int64_t step = 0; step < steps; step += each_part) {
      int64_t behind = min(steps, step + each_part);
      Part part = {step, behind, step == 0, behind == steps, a + each / 16 * each_part * TILE_BYTES};
      p.gate < 0 ? tiled_block<false>(p, row, rows, begin, end, part, a) : tiled_block<true>(p, row, rows, begin, end, part, a);
    }
  }
  _tile_release();
}
