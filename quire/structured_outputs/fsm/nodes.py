"""Trees of regular languages over text. Patterns and schemas are translated to them.

Nodes are compared by identity. A tree may share subtrees; an automaton is built once for each.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from quire.errors import RequestError

Ranges = tuple[tuple[int, int], ...]  # code points, both ends included; sorted and disjoint

SURROGATES = (0xD800, 0xDFFF)  # code points that cannot be in a text
ALL: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))


@dataclass(frozen=True, slots=True, eq=False)
class Chars:
    """One character of a set. An empty set matches no text, not even the empty one."""

    ranges: Ranges


@dataclass(frozen=True, slots=True, eq=False)
class Words:
    """One of these texts."""

    words: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """The parts, one after another."""

    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One of the options."""

    options: tuple["Node", ...]


@dataclass(frozen=True, slots=True, eq=False)
class Repeat:
    """The inner node, `least` to `most` times; most None: no limit."""

    inner: "Node"
    least: int
    most: int | None


@dataclass(frozen=True, slots=True, eq=False)
class SeparatedList:
    """The item one or more times, with the separator in between. The automaton has the item once."""

    item: "Node"
    separator: "Node"


@dataclass(frozen=True, slots=True, eq=False)
class Anchor:
    """The start or end of the text; in trees of the pattern parser only. at: position in the pattern."""

    at: int
    is_end: bool


Node = Chars | Words | Chain | Choice | Repeat | SeparatedList | Anchor

EMPTY = Words(("",))


def literal(text: str) -> Node:
    """One text."""
    return Words((text,))


def chain(parts: Iterable[Node]) -> Node:
    """The parts, one after another. Adjacent texts are joined."""
    joined: list[Node] = []
    for are_texts, run in groupby(parts, key=lambda part: isinstance(part, Words) and len(part.words) == 1):
        if are_texts:
            text = "".join(part.words[0] for part in run if isinstance(part, Words))
            joined += [Words((text,))] if text else []
        else:
            joined += run
    if not joined:
        return EMPTY
    return joined[0] if len(joined) == 1 else Chain(tuple(joined))


def choice(options: Iterable[Node]) -> Node:
    """One of the options. Texts are joined to one Words."""
    words: dict[str, None] = {}
    others: list[Node] = []
    for option in options:
        if isinstance(option, Words):
            words.update(dict.fromkeys(option.words))
        else:
            others.append(option)
    if words:
        others.append(Words(tuple(words)))
    return others[0] if len(others) == 1 else Choice(tuple(others))


def optional(node: Node) -> Node:
    """The node or nothing."""
    return Repeat(node, 0, 1)


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The ranges sorted and merged, without surrogates."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(
        (low, high)
        for first, last in merged
        for low, high in ((first, min(last, SURROGATES[0] - 1)), (max(first, SURROGATES[1] + 1), last))
        if low <= high
    )


def negation(ranges: Ranges) -> Ranges:
    """All code points but these. `ranges` must be sorted and merged, as by `union`."""
    starts = [0, *(high + 1 for _, high in ranges)]
    stops = [*(low - 1 for low, _ in ranges), 0x10FFFF]
    return union((start, stop) for start, stop in zip(starts, stops, strict=True) if start <= stop)


def intersection(one: Ranges, other: Ranges) -> Ranges:
    """The code points in both."""
    return union((max(a, c), min(b, d)) for a, b in one for c, d in other if max(a, c) <= min(b, d))


SEARCHED_FIELD = "stop_regex"  # the field with patterns that are searched in the output, and that no backend compiles
MAX_NESTING = 64  # groups within groups
MAX_RANGES = 4096  # in one character class
MAX_NFA_STATES = 50_000
MAX_PARTS = 60_000  # nodes of a tree, counted as often as they are built
MAX_DFA_STATES = 20_000
MAX_EFFORT = 1_500_000  # NFA states visited by the subset construction: about 0.25 s
MAX_ENTRIES = 8_000_000  # of a transition table: 32 MB
MAX_MASK_BYTES = 8 << 20  # of the token masks that one grammar caches


def too_complex(what: str, most: int, param: str) -> RequestError:
    """The error for a pattern or schema that needs more than `most` of `what`."""
    if param == SEARCHED_FIELD:
        return RequestError(f"the {param} is too complex: more than {most:,} {what}; shorten it", param)
    advice = "shorten it, lower its repetition counts, or use the llguidance backend"
    name = {"json": "json schema"}.get(param, param)
    return RequestError(f"the {name} is too complex for the fsm backend: more than {most:,} {what}; {advice}", param)
