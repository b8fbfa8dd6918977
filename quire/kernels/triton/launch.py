"""Launch parameters: whether kernels are compiled or interpreted, and sizes and order of tiles."""

from triton import knobs

INTERPRETED: bool = knobs.runtime.interpret  # on a CPU, for tests; set by TRITON_INTERPRET before the first import

CONSECUTIVE_TILES = 8  # tiles of rows whose programs are consecutive, so that they share a weight in the cache


def pow2(number: int) -> int:
    """The smallest power of two that is not below `number`, at least 1."""
    return 1 << max(number - 1, 0).bit_length()
