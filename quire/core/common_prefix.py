"""Common prefixes of lists of tokens."""

from collections.abc import Sequence


def common_prefix_len(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix, in tokens. Fastest if both are lists and equal."""
    if one == other:
        return len(one)
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)
