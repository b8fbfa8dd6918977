"""What every kernel here has to know about how it runs: compiled for a GPU, or interpreted on a CPU for tests."""

from triton import knobs

INTERPRETED: bool = knobs.runtime.interpret  # decided by TRITON_INTERPRET before the first import


def pow2(number: int) -> int:
    """The smallest power of two that is not below `number`, at least 1."""
    return 1 << max(number - 1, 0).bit_length()
