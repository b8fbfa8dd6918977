"""Ranges of code points as sequences of byte ranges: UTF-8."""

from collections.abc import Iterator

Span = tuple[int, int]  # bytes, both ends included

_LENGTHS = ((0x7F, 1), (0x7FF, 2), (0xFFFF, 3), (0x10FFFF, 4))  # the last code point of each number of bytes


def byte_ranges(low: int, high: int) -> Iterator[tuple[Span, ...]]:
    """Sequences of byte ranges that together are the UTF-8 of low to high; no surrogates in between."""
    start = 0
    for last, length in _LENGTHS:
        if max(low, start) <= min(high, last):
            yield from _of_length(max(low, start), min(high, last), length - 1)
        start = last + 1


def _of_length(low: int, high: int, num_more: int) -> Iterator[tuple[Span, ...]]:
    """Splits where the continuation bytes do not run through all values, so that each byte has one range."""
    for i in range(1, num_more + 1):
        rest = (1 << 6 * i) - 1
        if low >> 6 * i != high >> 6 * i:
            if low & rest:
                yield from _of_length(low, low | rest, num_more)
                yield from _of_length((low | rest) + 1, high, num_more)
                return
            if high & rest != rest:
                yield from _of_length(low, (high & ~rest) - 1, num_more)
                yield from _of_length(high & ~rest, high, num_more)
                return
    yield tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))
