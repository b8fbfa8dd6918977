// Operations on each row alone. A row is a token, or one of its heads.
//
// dtype is 0 for float32 and 1 for bf16. Norms and activations are computed in float32 and rounded once. The result of
// a row depends neither on other rows nor on the number of threads.
#include "rows.h"

namespace quire::ISA {

// ---- norms ----

namespace {
// outer * inner rows. In x, the rows of one outer index are contiguous; in the output, all rows are.
struct Norm {
  int64_t outer, inner, size, stride;  // stride: elements of x from one outer index to the next
  float eps;

  template <class T>
  const T* row(const T* x, int64_t index) const {
    return inner == 1 ? x + index * stride : x + index / inner * stride + index % inner * size;
  }
};
}  // namespace

INLINE float inverse_root(float mean, float eps) { return 1.0f / __builtin_sqrtf(mean + eps); }

template <class T, class W>
INLINE void scale_row(const T* x, const W* weight, T* out, float factor, int64_t size) {
  each_vector(size, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    store_some(out + i, load_some(x + i, n) * factor * load_some(weight + i, n), n);
  });
}

template <class T, class W>
static void rms_norms(const T* x, const W* weight, T* out, const Norm& norm, const Team& team) {
  int64_t size = norm.size, begin, end;
  part_of(team, norm.outer * norm.inner, size, &begin, &end);
  for (int64_t index = begin; index < end; index++) {
    const T* row = norm.row(x, index);
    float squares = sum_row(size, [&](Vec sum, int64_t i, int64_t n) __attribute__((always_inline)) {
      Vec v = load_some(row + i, n);
      return fma(v, v, sum);
    });
    scale_row(row, weight, out + index * size, inverse_root(squares / (float)size, norm.eps), size);
  }
}

// x, weight, out, dtype, dtype of the weight (not bf16 beside float32), outer, inner, size, stride, eps
void rms_norm(const Arg* a, const Team& team) {
  Norm norm = {a[5].integer, a[6].integer, a[7].integer, a[8].integer, (float)a[9].number};
  if (!a[3].integer)
    rms_norms((const float*)a[0].data, (const float*)a[1].data, (float*)a[2].data, norm, team);
  else if (a[4].integer)
    rms_norms((const bf16*)a[0].data, (const bf16*)a[1].data, (bf16*)a[2].data, norm, team);
  else
    rms_norms((const bf16*)a[0].data, (const float*)a[1].data, (bf16*)a[2].data, norm, team);
}

template <class T, class W>
static void add_rms_norms(const Arg* a, int64_t rows, int64_t size, float eps, const Team& team) {
  int64_t begin, end;
  part_of(team, rows, size, &begin, &end);
  for (int64_t row = begin; row < end; row++) {
    const T* x = (const T*)a[0].data + row * size;
    const T* residual = (const T*)a[1].data + row * size;
    T* total = (T*)a[3].data + row * size;
    float squares = sum_row(size, [&](Vec sum, int64_t i, int64_t n) __attribute__((always_inline)) {
      Vec v = rounded<T>(load_some(x + i, n) + load_some(residual + i, n));
      store_some(total + i, v, n);
      return fma(v, v, sum);
    });
    scale_row(total, (const W*)a[2].data, (T*)a[4].data + row * size, inverse_root(squares / (float)size, eps), size);
  }
}

// x, residual, weight, total, out, dtype, dtype of the weight (not bf16 beside float32), rows, size, eps
// total may be the memory of x or of residual, out that of the other one.
void add_rms_norm(const Arg* a, const Team& team) {
  int64_t rows = a[7].integer, size = a[8].integer;
  float eps = (float)a[9].number;
  if (!a[5].integer)
    add_rms_norms<float, float>(a, rows, size, eps, team);
  else if (a[6].integer)
    add_rms_norms<bf16, bf16>(a, rows, size, eps, team);
  else
    add_rms_norms<bf16, float>(a, rows, size, eps, team);
}

// The first n lanes of v, 0 in the others.
INLINE Vec first_lanes(Vec v, int64_t n) {
  return n >= LANES ? v : select(lane_numbers() < (int32_t)n, v, Vec{});
}

template <class T, class W>
static void layer_norms(const Arg* a, const Norm& norm, int64_t per_inner, const Team& team) {
  int64_t size = norm.size, begin, end;
  part_of(team, norm.outer * norm.inner, size, &begin, &end);
  for (int64_t index = begin; index < end; index++) {
    const T* row = norm.row((const T*)a[0].data, index);
    int64_t offset = per_inner ? index % norm.inner * size : 0;
    const W* weight = (const W*)a[1].data + offset;
    const W* bias = a[2].data ? (const W*)a[2].data + offset : nullptr;
    T* out = (T*)a[3].data + index * size;
    float mean = sum_row(size, [&](Vec sum, int64_t i, int64_t n) __attribute__((always_inline)) {
      return sum + load_some(row + i, n);
    }) / (float)size;
    float squares = sum_row(size, [&](Vec sum, int64_t i, int64_t n) __attribute__((always_inline)) {
      Vec v = first_lanes(load_some(row + i, n) - mean, n);
      return fma(v, v, sum);
    });
    float factor = inverse_root(squares / (float)size, norm.eps);
    each_vector(size, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
      Vec normed = (load_some(row + i, n) - mean) * factor;
      Vec added = bias ? load_some(bias + i, n) : Vec{};
      store_some(out + i, fma(normed, load_some(weight + i, n), added), n);
    });
  }
}

// x, weight, bias or None, out, dtype, dtype of weight and bias (not bf16 beside float32), outer, inner, size, stride,
// whether weight and bias are (inner, size), eps
void layer_norm(const Arg* a, const Team& team) {
  Norm norm = {a[6].integer, a[7].integer, a[8].integer, a[9].integer, (float)a[11].number};
  if (!a[4].integer)
    layer_norms<float, float>(a, norm, a[10].integer, team);
  else if (a[5].integer)
    layer_norms<bf16, bf16>(a, norm, a[10].integer, team);
  else
    layer_norms<bf16, float>(a, norm, a[10].integer, team);
}

// ---- activations ----

constexpr int64_t PIECE = 1024;  // numbers of a row that are one unit of work: few tokens may have very long rows

template <class T, Activation kind>
INLINE void activate_piece(const T* x, const T* second, T* out, int64_t size) {
  each_vector(size, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    Vec y = activate(kind, load_some(x + i, n));
    store_some(out + i, second ? y * load_some(second + i, n) : y, n);
  });
}

template <class T, Activation kind>
static void activate_rows(const Arg* a, const Team& team) {
  int64_t gated = a[4].integer, rows = a[5].integer, size = a[6].integer, begin, end;
  int64_t pieces = (size + PIECE - 1) / PIECE;
  part_of(team, rows * pieces, min(PIECE, size), &begin, &end);
  for (int64_t index = begin; index < end; index++) {
    int64_t row = index / pieces, first = index % pieces * PIECE;
    const T* x = (const T*)a[0].data + row * a[7].integer + first;
    T* out = (T*)a[1].data + row * size + first;
    activate_piece<T, kind>(x, gated ? x + size : nullptr, out, min(PIECE, size - first));
  }
}

template <class T>
static void activate_rows_by(Activation kind, const Arg* a, const Team& team) {
  switch (kind) {
#define KIND(name) \
  case Activation::name: \
    return activate_rows<T, Activation::name>(a, team);
    KIND(silu) KIND(gelu) KIND(gelu_tanh) KIND(relu) KIND(relu2) KIND(sigmoid) KIND(tanh) KIND(softplus)
#undef KIND
  }
}

// x, out, dtype, activation, gated, rows, size (of a row of `out`), stride (elements of x from row to row)
// out = activation(first `size` numbers of a row), if gated times the next `size` numbers. out may be x.
void activate(const Arg* a, const Team& team) {
  if (a[2].integer)
    activate_rows_by<bf16>((Activation)a[3].integer, a, team);
  else
    activate_rows_by<float>((Activation)a[3].integer, a, team);
}

// e^x - 1: a polynomial where e^x - 1 would lose digits, to x^7 / 7!.
INLINE Vec exp_minus_one(Vec x) {
  Vec p = splat(1.0f / 5040);
  p = fma(p, x, splat(1.0f / 720));
  p = fma(p, x, splat(1.0f / 120));
  p = fma(p, x, splat(1.0f / 24));
  p = fma(p, x, splat(1.0f / 6));
  p = fma(p, x, splat(0.5f));
  p = fma(p * x, x, x);
  return select(vmax(x, -x) > 0.5f, exp(x) - splat(1.0f), p);
}

template <class T>
static void xielu_of(const Arg* a, const Team& team) {
  int64_t begin, end;
  auto parameters = (const float*)a[1].data;
  alignas(64) float sums[2][LANES];
  for (int i = 0; i < 2; i++) store(sums[i], softplus(splat(parameters[i])));
  float beta = parameters[2], eps = parameters[3], positive = sums[0][0], negative = beta + sums[1][0];
  part_of(team, a[4].integer, 1, &begin, &end);
  auto x = (const T*)a[0].data + begin;
  auto out = (T*)a[2].data + begin;
  each_vector(end - begin, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    Vec v = load_some(x + i, n);
    Vec low = select(v > eps, splat(eps), v);  // NaN stays NaN
    Vec below = (exp_minus_one(low) - v) * negative;
    store_some(out + i, fma(v, splat(beta), select(v > 0.0f, v * v * positive, below)), n);
  });
}

// x, parameters float32 (4,), out, dtype, number of x
void xielu(const Arg* a, const Team& team) {
  if (a[3].integer)
    xielu_of<bf16>(a, team);
  else
    xielu_of<float>(a, team);
}

// Parts of `size` numbers that share a factor.
template <class T, class F>
static void multiply_adds(const Arg* a, const Team& team) {
  int64_t parts = a[6].integer, size = a[7].integer, begin, end;
  auto factors = (const F*)a[1].data;
  part_of(team, a[5].integer, parts * size, &begin, &end);
  for (int64_t row = begin; row < end; row++) {
    auto x = (const T*)a[0].data + row * a[8].integer;
    auto addend = a[2].data ? (const T*)a[2].data + row * parts * size : nullptr;
    auto out = (T*)a[3].data + row * parts * size;
    auto write = [&](int64_t i, int64_t n, Vec factor) __attribute__((always_inline)) {
      Vec v = load_some(x + i, n);
      store_some(out + i, addend ? fma(v, factor, load_some(addend + i, n)) : v * factor, n);
    };
    auto of_row = factors ? factors + row * a[9].integer : nullptr;
    if (factors && size == 1) {
      each_vector(parts, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        write(i, n, load_some(of_row + i, n));
      });
      continue;
    }
    for (int64_t part = 0; part < parts; part++) {
      Vec factor = splat(factors ? to_float(of_row[part]) : (float)a[10].number);
      each_vector(size, [&](int64_t i, int64_t n) __attribute__((always_inline)) { write(part * size + i, n, factor); });
    }
  }
}

// x, factors or None, addend or None, out, dtypes (0: all float32, 1: all bf16, 2: bf16 and float32 factors), rows, parts of a
// row, size of a part, strides from row to row of x and of factors, the factor without factors
void multiply_add(const Arg* a, const Team& team) {
  if (a[4].integer == 0)
    multiply_adds<float, float>(a, team);
  else if (a[4].integer == 1)
    multiply_adds<bf16, bf16>(a, team);
  else
    multiply_adds<bf16, float>(a, team);
}

// x, y, out, bytes of a number, rows, size and stride from row to row of x, the same of y
void concatenate(const Arg* a, const Team& team) {
  int64_t each = a[3].integer, x_bytes = each * a[5].integer, y_bytes = each * a[7].integer, begin, end;
  part_of(team, a[4].integer, a[5].integer + a[7].integer, &begin, &end);
  for (int64_t row = begin; row < end; row++) {
    char* out = (char*)a[2].data + row * (x_bytes + y_bytes);
    memcpy(out, (const char*)a[0].data + row * each * a[6].integer, x_bytes);
    memcpy(out + x_bytes, (const char*)a[1].data + row * each * a[8].integer, y_bytes);
  }
}

// x of bf16, out of float32, rows, size, stride of x from row to row
void widen(const Arg* a, const Team& team) {
  int64_t size = a[3].integer, begin, end;
  part_of(team, a[2].integer, size, &begin, &end);
  for (int64_t row = begin; row < end; row++) {
    auto x = (const bf16*)a[0].data + row * a[4].integer;
    auto out = (float*)a[1].data + row * size;
    each_vector(size, [&](int64_t i, int64_t n) __attribute__((always_inline)) { store_some(out + i, load_some(x + i, n), n); });
  }
}

// ---- positions ----

INLINE DVec select(LVec mask, DVec a, DVec b) { return (DVec)(((LVec)a & mask) | ((LVec)b & ~mask)); }

// Cosine and sine within 1e-11, up to angles of 2^20 quarters of a turn; beyond, the error grows with the angle.
INLINE void cos_sin(DVec angle, DVec* cos, DVec* sin) {
  const double magic = 6755399441055744.0;  // 1.5 * 2^52: the sum is rounded to an integer
  DVec shifted = angle * 0.63661977236758134 + magic;
  LVec quarter = (LVec)shifted;  // the low bits are the number of quarters of a turn
  DVec n = shifted - magic;
  DVec r = angle - n * 1.57079632673412561417;  // pi / 2 to 33 bits: the product is exact
  r = r - n * 6.07710050650619224932e-11;       // the rest of pi / 2
  DVec z = r * r;
  DVec s = ((((-1.0 / 39916800 * z + 1.0 / 362880) * z - 1.0 / 5040) * z + 1.0 / 120) * z - 1.0 / 6) * z * r + r;
  DVec c = (((((1.0 / 479001600 * z - 1.0 / 3628800) * z + 1.0 / 40320) * z - 1.0 / 720) * z + 1.0 / 24) * z - 0.5) * z + 1.0;
  LVec odd = -(quarter & 1);
  *sin = (DVec)((LVec)select(odd, c, s) ^ ((quarter & 2) << 62));
  *cos = (DVec)((LVec)select(odd, s, c) ^ (((quarter + 1) & 2) << 62));
}

// positions (num_tokens,) int64, frequencies (half,), cos, sin (num_tokens, half), num_tokens, half, magnitude
// Angles are rounded to float32, as in training.
void rotation(const Arg* a, const Team& team) {
  auto positions = (const int64_t*)a[0].data;
  auto frequencies = (const float*)a[1].data;
  int64_t half = a[5].integer, begin, end;
  double magnitude = a[6].number;
  part_of(team, a[4].integer, 8 * half, &begin, &end);  // 8 *: a cosine costs as much as several numbers elsewhere
  for (int64_t token = begin; token < end; token++)
    each_vector(half, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
      Vec angles = load_some(frequencies + i, n) * (float)positions[token];
      DVec halves[2], cos[2], sin[2];
      to_doubles(angles, &halves[0], &halves[1]);
      for (int part = 0; part < 2; part++) cos_sin(halves[part], &cos[part], &sin[part]);
      store_some((float*)a[2].data + token * half + i, from_doubles(cos[0] * magnitude, cos[1] * magnitude), n);
      store_some((float*)a[3].data + token * half + i, from_doubles(sin[0] * magnitude, sin[1] * magnitude), n);
    });
}

// ---- embeddings ----

template <class T>
static void embed_rows(const Arg* a, const Team& team) {
  int64_t size = a[5].integer, rows = a[6].integer, begin, end;
  float scale = (float)a[7].number;
  part_of(team, a[4].integer, size, &begin, &end);
  for (int64_t index = begin; index < end; index++) {
    int64_t id = ((const int64_t*)a[0].data)[index];
    const T* row = (const T*)a[1].data + id * size;
    T* out = (T*)a[2].data + index * size;
    if (id < 0 || id >= rows)
      memset(out, 0, size * sizeof(T));
    else if (scale == 1)
      memcpy(out, row, size * sizeof(T));
    else
      each_vector(size, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        store_some(out + i, load_some(row + i, n) * scale, n);
      });
  }
}

// ids (count,) int64, weight (rows, size), out (count, size), dtype, count, size, rows (other ids give zeros), scale
void embed(const Arg* a, const Team& team) {
  if (a[3].integer)
    embed_rows<bf16>(a, team);
  else
    embed_rows<float>(a, team);
}

}  // namespace quire::ISA
