"""Rounding of float32 to shorter types. GPUs round in conversions. The interpreter truncates, so it needs `nearest`."""
# ruff: noqa: ANN201 -- values in kernels have no types

import triton
import triton.language as tl


@triton.jit
def rounded(x, DTYPE: tl.constexpr, INTERPRET: tl.constexpr):
    """float32 x as DTYPE, rounded to nearest, ties to even."""
    if INTERPRET and tl.bfloat16 == DTYPE:
        x = nearest(x, 16)
    return x.to(DTYPE)


@triton.jit
def nearest(x, BITS: tl.constexpr):
    """float32 x with its last BITS bits rounded to zeros, to nearest, ties to even. NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    bits += ((1 << (BITS - 1)) - 1) + ((bits >> BITS) & 1)
    return tl.where(x == x, ((bits >> BITS) << BITS).to(tl.float32, bitcast=True), x)
