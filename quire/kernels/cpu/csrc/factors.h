// Scales that are 8-bit integers times a factor for each 256 columns of a row: those of GGUF's K-quants. The products are exact
// in float32.
//
// The scales of a tile are blocks, one for each 256 columns: factors float16 [16], factors of offsets float16 [16] if there
// are offsets, scales int8 [groups][16], and offsets int8 [groups][16]. A block is padded to 256 columns.
#pragma once
#include "codes.h"

namespace quire::ISA {

constexpr int64_t FACTOR_COLUMNS = 256;

struct Factors {
  bool has_offsets;
  int64_t groups, bytes;  // of a block
  int64_t tile_bytes;

  explicit Factors(const Format& f)
      : has_offsets(f.type == ScaleType::factored_with_offsets), groups(FACTOR_COLUMNS / (f.each * f.terms)),
        bytes((groups + 2) * 16 * (1 + has_offsets)), tile_bytes((f.groups + groups - 1) / groups * bytes) {}

  const char* block(const char* scales, int64_t tile, int64_t index) const {
    return scales + tile * tile_bytes + index * bytes;
  }
  const int8_t* scales(const char* block, int64_t group) const {  // group: of the block
    return (const int8_t*)block + 32 * (1 + has_offsets) + group * 16;
  }
  const int8_t* offsets(const char* block, int64_t group) const { return scales(block, group) + groups * 16; }
  const half* factors(const char* block) const { return (const half*)block; }
  const half* offset_factors(const char* block) const { return (const half*)block + 16; }
};

INLINE void read_bytes(const int8_t* p, Ints* v) {
#if defined(__AVX512F__)
  *v = (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
  *v = (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  for (int i = 0; i < REGISTER_LANES; i++) (*v)[i] = p[i];
#endif
}
template <class H>
INLINE void read_bytes(const int8_t* p, Pair<H>* v) {
  read_bytes(p, &v->low);
  read_bytes(p + sizeof(H) / 4, &v->high);
}
INLINE IVec load_bytes(const int8_t* p) {
  IVec v;
  read_bytes(p, &v);
  return v;
}

}  // namespace quire::ISA
