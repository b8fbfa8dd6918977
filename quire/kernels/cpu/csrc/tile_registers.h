// The tile registers of AMX: eight tiles of up to 16 rows of 64 bytes.
//
// With EMULATED_TILES the intrinsics that kernels use work in memory, so that tests need no processor with AMX.
#pragma once
#include "simd.h"

#if defined(__AMX_TILE__) || defined(EMULATED_TILES)
#define HAS_TILES
#endif

namespace quire::ISA {

constexpr int64_t TILE_BYTES = 1024;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

#if defined(EMULATED_TILES)
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbsud

struct EmulatedTiles {
  uint16_t row_bytes[8];  // zeros: not configured
  uint8_t rows[8];
  uint8_t data[8][16][64];
};
static thread_local EmulatedTiles emulated;

INLINE void _tile_loadconfig(const TileConfig* config) {
  emulated = {};
  memcpy(emulated.row_bytes, config->row_bytes, sizeof emulated.row_bytes);
  memcpy(emulated.rows, config->rows, sizeof emulated.rows);
}
INLINE void _tile_release() { emulated = {}; }

// As in the processor, a tile that is not configured must not be used.
INLINE void check_tile(int tile) {
  if (emulated.rows[tile] == 0) __builtin_trap();
}
INLINE void _tile_zero(int tile) {
  check_tile(tile);
  memset(emulated.data[tile], 0, TILE_BYTES);
}
INLINE void _tile_loadd(int tile, const void* from, int64_t stride) {
  _tile_zero(tile);
  for (int i = 0; i < emulated.rows[tile]; i++)
    memcpy(emulated.data[tile][i], (const char*)from + i * stride, emulated.row_bytes[tile]);
}
INLINE void _tile_stored(int tile, void* to, int64_t stride) {
  check_tile(tile);
  for (int i = 0; i < emulated.rows[tile]; i++)
    memcpy((char*)to + i * stride, emulated.data[tile][i], emulated.row_bytes[tile]);
}

// Adds the products of each row of `a` and each column of `b`, which are four bytes of its rows, to a number of `to`.
// add(sum, four bytes of a, four bytes of b)
template <class Number, class Add>
static void multiply_emulated(int to, int a, int b, Add add) {
  const EmulatedTiles& t = emulated;
  check_tile(to);
  if (t.rows[a] != t.rows[to] || t.row_bytes[a] != t.rows[b] * 4 || t.row_bytes[b] != t.row_bytes[to]) __builtin_trap();
  for (int i = 0; i < t.rows[to]; i++) {
    Number numbers[16], sums[16] = {};
    memcpy(numbers, t.data[to][i], sizeof numbers);
    for (int s = 0; s < t.rows[b]; s++)
      for (int j = 0; j < t.row_bytes[to] / 4; j++) add(&sums[j], t.data[a][i] + s * 4, t.data[b][s] + j * 4);
    for (int j = 0; j < 16; j++) numbers[j] += sums[j];
    memcpy(emulated.data[to][i], numbers, sizeof numbers);
  }
}
INLINE void _tile_dpbf16ps(int to, int a, int b) {
  multiply_emulated<float>(to, a, b, [](float* sum, const uint8_t* x, const uint8_t* y) {
    bf16 first[2], second[2];
    memcpy(first, x, 4);
    memcpy(second, y, 4);
    for (int i = 0; i < 2; i++) *sum += to_float(first[i]) * to_float(second[i]);
  });
}
INLINE void _tile_dpbsud(int to, int a, int b) {  // signed bytes times unsigned bytes
  multiply_emulated<int32_t>(to, a, b, [](int32_t* sum, const uint8_t* x, const uint8_t* y) {
    for (int i = 0; i < 4; i++) *sum += (int8_t)x[i] * y[i];
  });
}
#endif

INLINE void begin_tiles() {
  static const TileConfig config;
  _tile_loadconfig(&config);
}

}  // namespace quire::ISA
