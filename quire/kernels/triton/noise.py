"""Counter-based Gumbel noise in a kernel, with the random words of `quire.kernels.reference.philox`."""

import triton
import triton.language as tl


@triton.jit
def gumbel(seed_low, seed_high, position, sample_index, purpose, first, NUMBER: tl.constexpr) -> tl.tensor:
    """Standard Gumbel noise of tokens [first, first + NUMBER), both multiples of 4. Key and counter are int32 words."""
    quads = (first // 4 + tl.arange(0, NUMBER // 4)).to(tl.uint32)
    nothing = quads * 0
    a, b, c, d = tl.philox_impl(
        nothing + position.to(tl.uint32, bitcast=True),
        nothing + sample_index.to(tl.uint32, bitcast=True),
        nothing + purpose,
        quads,
        seed_low.to(tl.uint32, bitcast=True),
        seed_high.to(tl.uint32, bitcast=True),
        10,
    )
    words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    return -tl.log(exponential(words))


@triton.jit
def exponential(words) -> tl.tensor:
    """-log(u) with u = (word + 0.5) / 2^32, precise at both ends of the range, as in the reference.

    In the upper half -log(1 - s) = 2 atanh(s / (2 - s)), whose series needs eight terms for an s of up to 1/2.
    """
    upper = words >= 2147483648
    distance = tl.where(upper, 4294967295 - words, words).to(tl.int32)  # from the nearer end of the range
    share = (distance.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    z = tl.div_rn(share, 2.0 - share)
    square = z * z
    series = tl.full(z.shape, 1 / 15, tl.float32)
    for i in tl.static_range(7):
        series = tl.fma(series, square, 1.0 / (13 - 2 * i))
    return tl.where(upper, 2.0 * z * series, -tl.log(share))
