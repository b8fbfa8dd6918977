// The part of code_products.cpp that uses AMX: 64 codes of rows of x times 64 codes of columns of the weight at once.
//
// The sums of a group of x are the same integers as in vector code, and are added to floats in the same way. So results have
// the same bits. Groups of x have whole registers. Codes of 4 bits, and of 8 bits if k is no multiple of 64, are copied to
// whole registers of bytes. Codes of 6 bits and scales with factors have vector code only.

constexpr int64_t WIDENED_FROM_ROWS = 16;  // with fewer rows, codes of 4 bits are not worth the copy

INLINE bool fits_tiles(const CodeProduct& p) {
  const Format& f = p.format;
  bool whole = (f.x_groups == 1 || f.x_each * f.terms % 64 == 0) && f.bits != 6 && !f.has_factors();
  return whole && p.rows > (f.bits == 8 ? TILES_FROM_ROWS : WIDENED_FROM_ROWS);
}

namespace {
// A block of rows of x as codes, for tile registers: see product_tiles.h.
struct CodeBlock {
  struct Sums : TileSums {
    Panel panel;
    Vec scales[2];
  };

  const CodeProduct& p;
  const Format& f;
  const int64_t all_steps, group_steps, parts, widened_bytes;  // parts: groups of x in one of the weight
  const bool in_place;
  int8_t* codes;  // [row][all_steps][64]
  char* widened;  // two tiles of the weight
  RoundedRows rounded;
  int64_t first = 0, count = 0;  // rows of x

  static int64_t steps(const CodeProduct& p) { return up_to(p.k, 64) / 64; }
  static int64_t unit(const CodeProduct& p) {
    return p.format.x_groups == 1 ? steps(p) : p.format.x_each * p.format.terms / 64;
  }
  static int64_t memory_bytes(const CodeProduct& p, int64_t rows, int64_t part_steps) {
    return rows * steps(p) * 64 + RoundedRows::bytes(p.format, rows) + 2 * part_steps * TILE_BYTES;
  }

  CodeBlock(const CodeProduct& p, int64_t rows, int64_t part_steps, char* memory)
      : p(p), f(p.format), all_steps(steps(p)), group_steps(unit(p)), parts(f.groups == 1 ? f.x_groups : f.each / f.x_each),
        widened_bytes(part_steps * TILE_BYTES), in_place(f.bits == 8 && f.steps % 16 == 0), codes((int8_t*)memory),
        widened(memory + rows * all_steps * 64), rounded(f, rows, widened + 2 * widened_bytes) {}

  void lay_out(int64_t start, int64_t rows, const Part& part, char* a) {
    int64_t row_bytes = all_steps * 64, padded = up_to(rows, 16);
    if (part.first) {
      first = start;
      count = rows;
      memset(codes, 0, padded * row_bytes);
      for (int64_t i = 0; i < count; i++) rounded.round(p, start + i, codes + i * row_bytes, i);
    }
    for (int64_t i = 0; i < padded; i++) {
      const int8_t* row = codes + i * row_bytes;
      char* out = a + i / 16 * part.bytes() + i % 16 * 64;
      for (int64_t s = part.begin; s < part.end; s++, out += TILE_BYTES) memcpy(out, row + s * 64, 64);
    }
  }

  const char* weight(int64_t tile, const Part& part, int place) const {
    const char* source = p.weight + tile * f.steps * VECTOR_BYTES;
    if (in_place) return source + part.begin * TILE_BYTES;
    char *target = widened + place * widened_bytes, *out = target;
    int64_t begin = part.begin * 64 / f.terms, end = min(f.steps, part.end * 64 / f.terms);
    if (f.bits == 8) {
      memcpy(out, source + begin * VECTOR_BYTES, (end - begin) * VECTOR_BYTES);
      out += (end - begin) * VECTOR_BYTES;
    } else {
      Ints table = f.grid == Grid::integers ? Ints{} : biased_table(f.grid);
      auto put = [&](IVec codes) {
        store_bits(out, f.grid == Grid::integers ? codes : look_up(table, codes));
        out += VECTOR_BYTES;
      };
      for (int64_t s = begin; s < end; s++) {
        UVec bytes = load_bits<UVec>(source + s * VECTOR_BYTES);
        put((IVec)(bytes & 0x0f0f0f0fu));
        put((IVec)((bytes >> 4) & 0x0f0f0f0fu));
      }
    }
    memset(out, 0, target + part.bytes() - out);
    return target;
  }

  template <bool BOTH>
  INLINE_MEMBER void multiply(const char* a, int64_t row, const Panel& panel, const Part& part,
                              Beside<CodeBlock>& beside, const float* from, float* to) const {
    alignas(64) float integers[4 * 16 * 16];
    for (int64_t step = part.begin; step < part.end; step += group_steps, from = to) {
      int64_t x_group = step / group_steps, group = x_group / parts, begin = (step - part.begin) * TILE_BYTES;
      int64_t end = min(part.bytes(), begin + group_steps * TILE_BYTES);
      bool is_last = (x_group + 1) % parts == 0 || x_group + 1 == f.x_groups;
      multiply_tiles<true, BOTH>(a, part.bytes(), begin, end, beside, nullptr, integers, [] {});
      for (int64_t n = 0; n < 2; n++) {
        int64_t place = (panel.tiles[n] * f.groups + group) * 16;
        Vec scale = load_scales(f.type, p.scales, place);
        for (int64_t i = 0; i < min(BOTH ? 32 : 16, count - row); i++) {
          int64_t at = ((i / 16 * 2 + n) * 16 + i % 16) * 16, x_place = x_group * rounded.rows + row + i;
          Vec sums = from ? load(from + at) : Vec{}, x_scale = splat(rounded.scales[x_place]);
          Vec some = to_floats(load_bits<IVec>(integers + at) + splat_int(rounded.starts[x_place]));
          sums = f.scaled_at_end() ? fma(some, x_scale, sums) : fma(some * x_scale, scale, sums);
          if (!f.scaled_at_end() && is_last && p.offsets) sums = add_offset(sums, n, row + i, group, panel);
          store(to + at, sums);
        }
      }
    }
  }

  INLINE_MEMBER Vec add_offset(Vec sums, int64_t n, int64_t row, int64_t group, const Panel& panel) const {
    Vec offset = load_scales(f.type, p.offsets, (panel.tiles[n] * f.groups + group) * 16);
    return fma(splat(rounded.sums[group * rounded.rows + row]), offset, sums);
  }

  INLINE_MEMBER void begin(Sums& sums, const Panel& panel) const {
    sums.panel = panel;
    for (int n = 0; n < 2 && f.scaled_at_end(); n++) sums.scales[n] = load_scales(f.type, p.scales, panel.tiles[n] * 16);
  }

  __attribute__((noinline)) void finish_row(Sums& sums) const {
    int64_t i = sums.done++;
    bool has_adapters = p.adapters.slots != nullptr;
    if (has_adapters && i % FINISHED_ROWS == 0) p.is_bf16 ? add_adapters<bf16>(sums, i) : add_adapters<float>(sums, i);
    Vec results[2];
    for (int n = 0; n < 2; n++)
      results[n] = has_adapters ? load(sums.values[i / 16][n][i % 16]) : result(sums, i, n);
    p.is_bf16 ? write<bf16>(sums, sums.first + i, results) : write<float>(sums, sums.first + i, results);
  }

  // The sums of row i and tile n of the panel, times scales.
  INLINE_MEMBER Vec result(const Sums& sums, int64_t i, int n) const {
    Vec found = load(sums.values[i / 16][n][i % 16]);
    if (!f.scaled_at_end()) return found;
    found = opaque(found * sums.scales[n]);
    return p.offsets ? add_offset(found, n, sums.first + i - first, 0, sums.panel) : found;
  }

  // Replaces the sums of rows i, ..., i + FINISHED_ROWS - 1 by results, to which adapters are added.
  template <class T>
  void add_adapters(Sums& sums, int64_t i) const {
    for (int64_t j = i; j < min(i + FINISHED_ROWS, sums.rows); j++)
      for (int n = 0; n < 2; n++) store(sums.values[j / 16][n][j % 16], result(sums, j, n));
    add_adapters_to<T>(p, {sums.panel.tiles[0], sums.panel.tiles[1]}, sums, i);
  }

  template <class T>
  INLINE_MEMBER void write(const Sums& sums, int64_t row, const Vec (&results)[2]) const {
    finish<T>(p, row, sums.panel.columns[0], results[0], results[1]);
    if (p.gate < 0) finish<T>(p, row, sums.panel.columns[1], results[1], Vec{});
  }
};
}  // namespace
