"""Launch parameters: whether kernels are compiled or interpreted, and powers of two for tile sizes."""

from triton import knobs

INTERPRETED: bool = knobs.runtime.interpret  # on a CPU, for tests; set by TRITON_INTERPRET before the first import


def pow2(number: int) -> int:
    """The smallest power of two that is not below `number`, at least 1."""
    return 1 << max(number - 1, 0).bit_length()
