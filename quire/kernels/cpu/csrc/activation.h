// Activations of MLPs, in the order of the contract's ACTIVATIONS.
#pragma once
#include "simd.h"

namespace quire::ISA {

enum class Activation { silu, gelu, gelu_tanh, relu, relu2, sigmoid, tanh, softplus };

// x as it would be read back after it was stored as T.
template <class T>
INLINE Vec rounded(Vec x) {
  return sizeof(T) == sizeof(bf16) ? (Vec)((UVec)to_bf16(x) << 16) : x;
}

INLINE Vec sigmoid(Vec x) { return reciprocal(splat(1.0f) + exp(-x)); }  // undefined for NaN

// e^2x loses digits for small x, so the polynomial of Cephes (Moshier) is used there. Relative error below 2^-22; NaN
// stays NaN.
INLINE Vec hyperbolic_tangent(Vec x) {
  Vec z = x * x;
  Vec p = splat(-5.70498872745e-3f);
  p = fma(p, z, splat(2.06390887954e-2f));
  p = fma(p, z, splat(-5.37397155531e-2f));
  p = fma(p, z, splat(1.33314422036e-1f));
  p = fma(p, z, splat(-3.33332819422e-1f));
  Vec near = fma(p * z, x, x);
  return select(vmax(x, -x) > 0.625f, tanh(x), near);
}

// The standard normal distribution function, with a relative error of about 1e-6 in both tails: half of erfc, which is
// a fit in 1 / (1 + a / 2) times e^-a^2 (Press et al., Numerical Recipes, 6.2).
INLINE Vec normal_below(Vec x) {
  Vec a = vmax(x, -x) * splat(0.70710678f);
  Vec t = splat(1.0f) / fma(a, splat(0.5f), splat(1.0f));
  Vec p = splat(0.17087277f);
  p = fma(p, t, splat(-0.82215223f));
  p = fma(p, t, splat(1.48851587f));
  p = fma(p, t, splat(-1.13520398f));
  p = fma(p, t, splat(0.27886807f));
  p = fma(p, t, splat(-0.18628806f));
  p = fma(p, t, splat(0.09678418f));
  p = fma(p, t, splat(0.37409196f));
  p = fma(p, t, splat(1.00002368f));
  p = fma(p, t, splat(-1.26551223f));
  Vec tail = splat(0.5f) * t * exp(fma(-a, a, p));
  return select(x > 0.0f, splat(1.0f) - tail, tail);
}

// log(1 + e^x): max(x, 0) + log(1 + e^-|x|), whose logarithm is 2 atanh(z / (z + 2)) with z up to 1. NaN stays NaN.
INLINE Vec softplus(Vec x) {
  Vec z = exp(-vmax(x, -x));
  Vec s = z / (z + splat(2.0f)), t = s * s;
  Vec p = splat(1.0f / 13);
  p = fma(p, t, splat(1.0f / 11));
  p = fma(p, t, splat(1.0f / 9));
  p = fma(p, t, splat(1.0f / 7));
  p = fma(p, t, splat(1.0f / 5));
  p = fma(p, t, splat(1.0f / 3));
  p = fma(p, t, splat(1.0f));
  return fma(s + s, p, vmax(Vec{}, x));
}

INLINE Vec activate(Activation kind, Vec x) {
  switch (kind) {
    case Activation::silu:
      return x * sigmoid(x);
    case Activation::gelu:
      return x * normal_below(x);
    case Activation::gelu_tanh:
      return x * sigmoid(splat(1.59576912f) * fma(splat(0.044715f) * x * x, x, x));  // (1 + tanh(u)) / 2 is sigmoid(2u)
    case Activation::relu:
      return vmax(Vec{}, x);  // in this order NaN stays NaN
    case Activation::relu2:
      return vmax(Vec{}, x) * vmax(Vec{}, x);
    case Activation::sigmoid:
      return select(x == x, sigmoid(x), x);
    case Activation::tanh:
      return hyperbolic_tangent(x);
    case Activation::softplus:
      return softplus(x);
  }
  return x;
}

}  // namespace quire::ISA
