// Functions for kernels that work row by row: division of work, row sums, rotation.
#pragma once
#include "activation.h"
#include "team.h"

namespace quire::ISA {

constexpr int64_t FEW_NUMBERS = 16384;  // up to this much work, a second thread gains nothing

// This thread's part of `count` rows of `size` numbers each. The first thread does small work alone.
INLINE void part_of(const Team& team, int64_t count, int64_t size, int64_t* begin, int64_t* end) {
  if (count * size > FEW_NUMBERS) return team.share(count, 1, begin, end);
  *begin = 0;
  *end = team.rank == 0 ? count : 0;
}

// Calls visit(i, n) for each range [i, i + n) of a row: whole vectors, then the rest.
template <class F>
INLINE void each_vector(int64_t size, F visit) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) visit(i, LANES);
  if (i < size) visit(i, size - i);
}

// The sum over a row, in an order that depends on its size alone. add(sum, i, n) adds the range [i, i + n).
template <class F>
INLINE float sum_row(int64_t size, F add) {
  Vec sums[4] = {};  // four independent sums hide the latency of additions
  int64_t i = 0;
  for (; i + 4 * LANES <= size; i += 4 * LANES)
    for (int j = 0; j < 4; j++) sums[j] = add(sums[j], i + j * LANES, LANES);
  for (int j = 0; j < 4; j++, i += LANES)
    if (i < size) sums[j] = add(sums[j], i, min(LANES, size - i));
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Rotates pairs (x[i], x[i + half]) of a head and copies the numbers after them. x may be `out`. Results are rounded to
// T even if Target is a wider type.
template <class T, class Target>
INLINE void rotate(const T* x, Target* out, const float* cos, const float* sin, int64_t half, int64_t dim) {
  each_vector(half, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    Vec first = load_some(x + i, n), second = load_some(x + half + i, n);
    Vec c = load_some(cos + i, n), s = load_some(sin + i, n);
    Vec one = fma(first, c, -(second * s)), other = fma(second, c, first * s);
    if (sizeof(T) < sizeof(Target)) one = rounded<T>(one), other = rounded<T>(other);
    store_some(out + i, one, n);
    store_some(out + half + i, other, n);
  });
  x += 2 * half;
  out += 2 * half;
  each_vector(dim - 2 * half, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    store_some(out + i, load_some(x + i, n), n);
  });
}

// Rotates all heads of x. stride: elements between tokens of x; `out` is contiguous. cos and sin (num_tokens, half).
template <class T>
static void rotate_heads(const T* x, int64_t stride, T* out, const float* cos, const float* sin, int64_t half,
                         int64_t num_tokens, int64_t heads, int64_t dim, const Team& team) {
  int64_t begin, end;
  part_of(team, num_tokens * heads, 2 * dim, &begin, &end);
  int64_t token = begin / heads, head = begin % heads;
  for (int64_t i = begin; i < end; i++) {
    rotate(x + token * stride + head * dim, out + i * dim, cos + token * half, sin + token * half, half, dim);
    if (++head == heads) head = 0, token++;
  }
}

}  // namespace quire::ISA
