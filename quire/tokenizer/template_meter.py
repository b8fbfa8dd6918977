"""What a chat template may spend: processor time and the amount of data it makes. Knows nothing of Jinja.

A template is data from a model folder, so it may be wrong or hostile. Every loop turn, call, filter
and operator of it spends a step here, and every value it makes is measured before anything can be
made from it: so each step costs little, and the steps end.
"""

import re
import time
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView

MAX_SECONDS = 2.0  # of this thread's processor time, for one rendering
MAX_SIZE = 2**23  # characters in one value
MAX_TOTAL = 2**27  # characters in all values together
MAX_WORK = 2**26  # length of a text times what may be put into it
ITEM_SIZE = 8  # what a number, a key or an empty list counts, in characters
_WIDE_FIELD = re.compile(r"\d{4}")
_CONTAINERS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)


class TooMuch(Exception):
    """A template spent more than it may."""


class Meter:
    """What is left for one rendering."""

    def __init__(self, seconds: float = MAX_SECONDS) -> None:
        self._deadline = time.thread_time() + seconds
        self._total = 0

    def step(self) -> None:
        """Count one operation."""
        if time.thread_time() > self._deadline:
            raise TooMuch("it takes too long")

    def measure(self, value: object) -> int:
        """Characters that `value` holds, counted into the total."""
        size = size_of(value)
        self._total += size
        if self._total > MAX_TOTAL:
            raise TooMuch("it makes too much text")
        return size

    def count(self, items: Iterator[object]) -> Iterator[object]:
        """The same items, each a step and measured."""
        for item in items:
            self.step()
            self.measure(item)
            yield item


def size_of(value: object) -> int:
    """Characters of a value of strings, numbers, lists and mappings; stops counting at MAX_SIZE."""
    if isinstance(value, str):
        stack, size = [], len(value)
    else:
        stack, size = [value], 0
    while stack and size <= MAX_SIZE:
        item = stack.pop()
        size += ITEM_SIZE
        if isinstance(item, str | bytes):
            size += len(item)
        elif isinstance(item, int):
            size += item.bit_length()
        elif isinstance(item, Mapping):
            stack += item.keys()
            stack += item.values()
        elif isinstance(item, _CONTAINERS):
            stack += item
        elif isinstance(item, range):
            size += ITEM_SIZE * len(item)
    if size > MAX_SIZE:
        raise TooMuch(f"it makes a value of more than {MAX_SIZE} characters")
    return size


def check_growth(value: object, operands: Sequence[object]) -> None:
    """Refuse an operation whose result could be as long as `value` times the longest of `operands`."""
    longest = max([abs(o) if isinstance(o, int) else size_of(o) for o in operands], default=1)
    if max(1, size_of(value)) * longest > MAX_WORK:
        raise TooMuch("it makes a text grow too much at once")


def check_format(text: str, operands: Sequence[object]) -> None:
    """Refuse a format string with wide fields, or with too much to put into them."""
    if _WIDE_FIELD.search(text):
        raise TooMuch("it formats a field of a thousand characters or more")
    check_growth(text, operands)


def check_numbers(operator: str, left: object, right: object) -> None:
    """Refuse products and powers of whole numbers with thousands of digits."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_SIZE // 1024:
            raise TooMuch("it makes a number with thousands of digits")
