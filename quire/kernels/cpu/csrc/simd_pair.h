// Vectors longer than the machine's registers: pairs of halves, with the operators of GCC's vectors.
//
// GCC also supports vectors of any length, but it keeps those longer than a register in memory, and compiles their
// comparisons and conversions number by number.
#pragma once
#include <cstdint>
#include <cstring>

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))

namespace quire::ISA {

// Declared only for their types.
template <class H>
H& some();
template <class N>
N number_of(N&);

template <class H>
struct Pair {
  H low, high;

  using Number = decltype(number_of(some<H>()[0]));
  static constexpr int HALF = sizeof(H) / sizeof(Number);

  INLINE_MEMBER Number& operator[](int i) { return i < HALF ? ((Number*)&low)[i] : ((Number*)&high)[i - HALF]; }
  template <class G>
  INLINE_MEMBER explicit operator Pair<G>() const {  // the same bits, as numbers of another type
    return {(G)low, (G)high};
  }
  INLINE_MEMBER Pair operator-() const { return {-low, -high}; }
  INLINE_MEMBER Pair operator~() const { return {~low, ~high}; }

#define OPERATOR(op) \
  friend INLINE_MEMBER Pair operator op(const Pair& a, const Pair& b) { return {a.low op b.low, a.high op b.high}; } \
  friend INLINE_MEMBER Pair operator op(const Pair& a, Number b) { return {a.low op b, a.high op b}; } \
  friend INLINE_MEMBER Pair operator op(Number a, const Pair& b) { return {a op b.low, a op b.high}; } \
  template <class B> \
  INLINE_MEMBER Pair& operator op##=(const B& b) { \
    return *this = *this op b; \
  }
  OPERATOR(+) OPERATOR(-) OPERATOR(*) OPERATOR(/) OPERATOR(&) OPERATOR(|) OPERATOR(^) OPERATOR(<<) OPERATOR(>>)
#undef OPERATOR

  using Mask = Pair<decltype(H{} < H{})>;  // lanes of 0 or -1
#define COMPARISON(op) \
  friend INLINE_MEMBER Mask operator op(const Pair& a, const Pair& b) { return {a.low op b.low, a.high op b.high}; } \
  friend INLINE_MEMBER Mask operator op(const Pair& a, Number b) { return {a.low op b, a.high op b}; }
  COMPARISON(<) COMPARISON(>) COMPARISON(<=) COMPARISON(>=) COMPARISON(==) COMPARISON(!=)
#undef COMPARISON
};

// `count` registers as one vector: the register itself, a pair, or a pair of pairs.
template <class Register, int count>
struct Several {
  using Type = Pair<typename Several<Register, count / 2>::Type>;
};
template <class Register>
struct Several<Register, 1> {
  using Type = Register;
};

// Loads and stores of bits.
template <class V>
INLINE void read_bits(const void* p, V* v) {
  memcpy(v, p, sizeof(V));
}
template <class H>
INLINE void read_bits(const void* p, Pair<H>* v) {
  read_bits(p, &v->low);
  read_bits((const char*)p + sizeof(H), &v->high);
}
template <class V>
INLINE V load_bits(const void* p) {
  V v;
  read_bits(p, &v);
  return v;
}
template <class V>
INLINE void store_bits(void* p, V v) {
  memcpy(p, &v, sizeof(V));
}
template <class H>
INLINE void store_bits(void* p, Pair<H> v) {
  store_bits(p, v.low);
  store_bits((char*)p + sizeof(H), v.high);
}

// Define a function of simd.h that works lane by lane for pairs, from its definition for one half.
#define EACH(name) \
  template <class H> \
  INLINE auto name(Pair<H> a) -> Pair<decltype(name(a.low))> { \
    return {name(a.low), name(a.high)}; \
  }
#define EACH_OF_TWO(name) \
  template <class H> \
  INLINE Pair<H> name(Pair<H> a, Pair<H> b) { \
    return {name(a.low, b.low), name(a.high, b.high)}; \
  }

}  // namespace quire::ISA
