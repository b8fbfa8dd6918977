"""Trees of the texts of JSON strings, numbers and constants."""

import json
import math
from collections.abc import Iterable, Sequence

from quire.structured_outputs.fsm.nodes import (
    ALL,
    EMPTY,
    Chain,
    Chars,
    Choice,
    Node,
    Ranges,
    Repeat,
    Words,
    chain,
    choice,
    intersection,
    literal,
    negation,
    optional,
    union,
)

BLANKS: Ranges = ((0x09, 0x0A), (0x0D, 0x0D), (0x20, 0x20))

_RAW = negation(union([(0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]))  # characters that stand for themselves
_ESCAPED = {code: json.dumps(chr(code))[1:-1] for code in (*range(0x20), 0x22, 0x5C)}
_SHORT = [text for text in _ESCAPED.values() if len(text) == 2]  # all but \u00..

CHARACTER = choice([Chars(_RAW), Words((*_SHORT, "\\/"))])  # of a string without a pattern or format
DIGIT = Chars(((0x30, 0x39),))
_FIRST_DIGIT = Chars(((0x31, 0x39),))
_SIGN = optional(literal("-"))
NATURAL = choice([literal("0"), chain([_FIRST_DIGIT, Repeat(DIGIT, 0, None)])])
INTEGER = chain([_SIGN, NATURAL])
_FRACTION = optional(chain([literal("."), Repeat(DIGIT, 1, None)]))
_EXPONENT = optional(chain([Words(("e", "E")), optional(Words(("+", "-"))), Repeat(DIGIT, 1, 2)]))
POSITIVE = chain([NATURAL, _FRACTION, _EXPONENT])  # zero included
NUMBER = chain([_SIGN, POSITIVE])


def quoted(content: Node) -> Node:
    """The content between quotes."""
    return chain([literal('"'), content, literal('"')])


def json_escaped(node: Node) -> Node:
    """The tree of a string's texts as a tree of their JSON forms. Each character has one form."""
    match node:
        case Chars(ranges):
            escaped = [text for code, text in _ESCAPED.items() if intersection(ranges, ((code, code),))]
            return choice([Chars(intersection(ranges, _RAW)), *map(literal, escaped)])
        case Words(words):
            return Words(tuple(scalar_to_json(word)[1:-1] for word in words))
        case Chain(parts):
            return chain(map(json_escaped, parts))
        case Choice(options):
            return choice(map(json_escaped, options))
        case Repeat(inner, least, most):
            return Repeat(json_escaped(inner), least, most)
    raise AssertionError(f"a parsed pattern has no {node}")


def scalar_to_json(value: object) -> str:
    """A scalar as JSON, with no more escapes than JSON needs. Raises ValueError for NaN and infinity."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def integers(least: float | None, most: float | None) -> Node:
    """All integers from least to most; None: no bound."""
    low = -math.inf if least is None else math.ceil(least)
    high = math.inf if most is None else math.floor(most)
    options = []
    if low < 0:
        options.append(chain([literal("-"), _naturals(max(1, -high), -low)]))
    if high >= 0:
        options.append(_naturals(max(0, low), high))
    return choice(options) if low <= high else Chars(())


def _naturals(least: float, most: float) -> Node:
    """All integers from least to most, none below 0. most may be infinite."""
    if least > most:
        return Chars(())
    low = str(int(least))
    if most == math.inf:
        longer = chain([_FIRST_DIGIT, Repeat(DIGIT, len(low), None)])
        return choice([_between(low, "9" * len(low)), longer])
    high = str(int(most))
    options = []
    for length in range(len(low), len(high) + 1):
        first = low if length == len(low) else "1" + "0" * (length - 1)
        last = high if length == len(high) else "9" * length
        options.append(_between(first, last))
    return choice(options)


def _between(low: str, high: str) -> Node:
    """The numbers from low to high, which have equally many digits."""
    num_same = next((i for i, (a, b) in enumerate(zip(low, high, strict=True)) if a != b), len(low))
    if num_same == len(low):
        return literal(low)
    rest = len(low) - num_same - 1
    first, last = int(low[num_same]), int(high[num_same])
    options = [
        chain([literal(low[num_same]), _beyond(low[num_same + 1 :], up=True)]),
        chain([_digits(first + 1, last - 1), Repeat(DIGIT, rest, rest)]),
        chain([literal(high[num_same]), _beyond(high[num_same + 1 :], up=False)]),
    ]
    return chain([literal(low[:num_same]), choice(options)])


def _beyond(digits: str, *, up: bool) -> Node:
    """The numbers of as many digits as `digits`, not below it (up) or not above it."""
    node: Node = EMPTY
    for count, digit in enumerate(reversed(digits)):
        further = _digits(int(digit) + 1, 9) if up else _digits(0, int(digit) - 1)
        node = choice([chain([literal(digit), node]), chain([further, Repeat(DIGIT, count, count)])])
    return node


def _digits(first: int, last: int) -> Chars:
    return Chars(((0x30 + first, 0x30 + last),) if first <= last else ())


def separated(items: Sequence[Node], blank: Node) -> Iterable[Node]:
    """The items with a comma and `blank` between them."""
    for i, item in enumerate(items):
        if i:
            yield literal(",")
            yield blank
        yield item


def is_blank(node: Node) -> bool:
    """Whether the node matches only white space of JSON."""
    match node:
        case Chars(ranges):
            return intersection(ranges, BLANKS) == ranges
        case Words(words):
            return not "".join(words).strip(" \t\n\r")
        case Chain(nodes) | Choice(nodes):
            return all(map(is_blank, nodes))
        case Repeat(inner):
            return is_blank(inner)
    return False


ANY = Chars(ALL)
