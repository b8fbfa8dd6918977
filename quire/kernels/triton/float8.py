"""Numbers of float8 (e4m3) in wider types."""
# ruff: noqa: ANN201 -- values in kernels have no types

import triton
import triton.language as tl

_EXPONENTS = tl.constexpr(2.0**120)  # between those of float32 and of e4m3


@triton.jit
def widened_e4m3(codes, TYPE: tl.constexpr, INTERPRET: tl.constexpr):
    """The float8 numbers with these bits (8-bit integers) as TYPE. Exact, but NaN becomes 480.

    Shifts move the bits to their places in a wider float, and a product with a power of two corrects the exponent,
    because the GPU's conversion from float8 to bfloat16 is slow, and older GPUs have none.
    """
    if tl.bfloat16 == TYPE and not INTERPRET:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high, part, tiny, size;
            mov.b32 tiny, 0x80008000;
            mov.b32 size, 0x7b807b80;
            prmt.b32 low, $2, 0, 0x1404;
            prmt.b32 high, $2, 0, 0x3424;
            and.b32 part, low, 0x7f007f00;
            shr.b32 part, part, 4;
            lop3.b32 low, low, 0x80008000, part, 0xea;
            fma.rn.bf16x2 $0, low, size, tiny;
            and.b32 part, high, 0x7f007f00;
            shr.b32 part, part, 4;
            lop3.b32 high, high, 0x80008000, part, 0xea;
            fma.rn.bf16x2 $1, high, size, tiny;
            }
            """,
            "=r,=r,r",
            [codes],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        bits = codes.to(tl.int32)
        return (((bits & 127) << 20 | bits << 24 & -2147483648).to(tl.float32, bitcast=True) * _EXPONENTS).to(TYPE)
