"""What an operation of a chat template may cost: processor time, size of values, and the filters of Jinja one by one.

A check looks at the operands before an operation runs, and raises LimitExceeded if it could take long.
"""

import re
import time
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from types import MappingProxyType

MAX_SECONDS = 2.0  # processor time of the thread, for one rendering
MAX_SIZE = 2**23  # characters in one value
MAX_TOTAL = 2**27  # characters in all values together
MAX_WORK = 2**26  # length of a text times the length of an operand
MAX_COPIED = 2**28  # characters that are copied
MAX_WORD_SQUARES = 2**24  # sum of the squares of the lengths of words
MAX_PRINTED = 2**20  # size of a value times its depth
MAX_DIGITS = 1000  # of a rounded number
ITEM_SIZE = 8  # characters that a container, a number and an item count in addition to their text
_LEAST_TAGS = 64  # a text is searched and unescaped, too
_WIDE_FIELD = re.compile(r"\d{4}")
_CONTAINERS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)


class LimitExceeded(Exception):
    """A template exceeded a limit."""


class Meter:
    """Counts the time and the size of one rendering. seconds: processor time from now on."""

    def __init__(self, seconds: float = MAX_SECONDS) -> None:
        self._deadline = time.thread_time() + seconds
        self._total = 0

    def step(self) -> None:
        """Check the time before an operation. Raises LimitExceeded."""
        if time.thread_time() > self._deadline:
            raise LimitExceeded("it ran too long")

    def measure(self, value: object) -> int:
        """Add the size of `value` to the total and return it, in characters. Raises LimitExceeded."""
        size = size_of(value)
        self._total += size
        if self._total > MAX_TOTAL:
            raise LimitExceeded("its values are too large in total")
        return size

    def count(self, items: Iterator[object]) -> Iterator[object]:
        """The same items, each as a step and measured. Raises LimitExceeded."""
        for item in items:
            self.step()
            self.measure(item)
            yield item


def size_of(value: object) -> int:
    """Size in characters of a value of strings, numbers, lists and mappings. Raises LimitExceeded above MAX_SIZE."""
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
        raise LimitExceeded(f"it creates a value of more than {MAX_SIZE} characters")
    return size


def check_growth(value: object, operands: Sequence[object]) -> None:
    """Raises LimitExceeded if the size of `value` times the largest operand exceeds MAX_WORK."""
    longest = max([abs(o) if isinstance(o, int) else size_of(o) for o in operands], default=1)
    if max(1, size_of(value)) * longest > MAX_WORK:
        raise LimitExceeded("it multiplies the size of a text by too much")


def check_format(text: str, operands: Sequence[object]) -> None:
    """Raises LimitExceeded for a format string with wide fields or large operands."""
    if _WIDE_FIELD.search(text):
        raise LimitExceeded("it formats a field of a thousand characters or more")
    check_growth(text, operands)


def check_numbers(operator: str, left: object, right: object) -> None:
    """Raises LimitExceeded for a product or power of integers with thousands of digits."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_SIZE // 1024:
            raise LimitExceeded("it computes a number with thousands of digits")


Check = Callable[[object, Sequence[object], Mapping[str, object]], None]  # the value, its arguments, those by name


def check_tags(text: str) -> None:
    """Raises LimitExceeded if the removal of tags, which copies the text for each tag, takes long."""
    if max(_LEAST_TAGS, text.count("<")) * len(text) > MAX_COPIED:
        raise LimitExceeded("it removes too many tags from a text that is too long")


def _check_striptags(value: object, arguments: Sequence[object], named: Mapping[str, object]) -> None:
    check_tags(str(value))


def _check_product(value: object, arguments: Sequence[object], named: Mapping[str, object]) -> None:
    check_growth(value, (*arguments, *named.values()))


def _check_format(value: object, arguments: Sequence[object], named: Mapping[str, object]) -> None:
    check_format(str(value), (*arguments, *named.values()))


def _check_words(value: object, arguments: Sequence[object], named: Mapping[str, object]) -> None:
    """The patterns of these filters take the square of a word's length. Texts among the operands stand at each word."""
    if sum(len(word) ** 2 for word in str(value).split()) > MAX_WORD_SQUARES:
        raise LimitExceeded("it splits a text with words of thousands of characters")
    check_growth(value, [operand for operand in (*arguments, *named.values()) if not isinstance(operand, int)])


def _check_pprint(value: object, arguments: Sequence[object], named: Mapping[str, object]) -> None:
    """The filter writes each value once for each container around it."""
    size = size_of(value)
    if size > MAX_PRINTED or size * _depth(value) > MAX_PRINTED:
        raise LimitExceeded("it formats a value that is too large or too deep")


def _check_round(value: object, arguments: Sequence[object], named: Mapping[str, object]) -> None:
    precision = arguments[0] if arguments else named.get("precision", 0)
    if isinstance(precision, int) and abs(precision) > MAX_DIGITS:
        raise LimitExceeded(f"it rounds to more than {MAX_DIGITS} digits")


def _depth(value: object) -> int:
    stack, deepest = [(value, 1)], 1
    while stack:
        item, depth = stack.pop()
        deepest = max(deepest, depth)
        if isinstance(item, Mapping):
            stack += [(one, depth + 1) for one in (*item.keys(), *item.values())]
        elif isinstance(item, _CONTAINERS):
            stack += [(one, depth + 1) for one in item]
    return deepest


_LINEAR = (
    *("abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "filesizeformat", "first"),
    *("float", "forceescape", "groupby", "int", "items", "last", "length", "list", "lower", "map", "max", "min"),
    *("random", "reject", "rejectattr", "reverse", "safe", "select", "selectattr", "sort", "string", "sum", "title"),
    *("tojson", "unique", "upper", "urlencode", "wordcount", "xmlattr"),
)
# All filters of Jinja, with what is checked before one runs. The sandbox has no filter that is not here.
FILTER_CHECKS: Mapping[str, Check | None] = MappingProxyType(
    {
        **dict.fromkeys(_LINEAR),
        **dict.fromkeys(["batch", "center", "indent", "join", "replace", "slice", "trim", "truncate"], _check_product),
        **dict.fromkeys(["urlize", "wordwrap"], _check_words),
        "format": _check_format,
        "pprint": _check_pprint,
        "round": _check_round,
        "striptags": _check_striptags,
    }
)

# Filters that read an attribute of each item, and its position among the arguments. Objects whose size is not counted,
# such as namespaces, can have large attributes: these are measured before the filter runs.
ATTRIBUTE_POSITIONS: Mapping[str, int] = MappingProxyType(
    {"groupby": 0, "join": 1, "max": 1, "min": 1, "sort": 2, "sum": 0, "unique": 1}
)
