"""The parts of a rule of EBNF, and what can be said of them without parsing a text: what they begin and end with.

Characters are told in classes, so that a set of them is a bit mask: two characters between which no rule of the grammar
makes a difference are in one class.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

Ranges = tuple[tuple[int, int], ...]  # code points, first and last

LAST = 0x10FFFF
_MAX_LOOKS = 50_000


@dataclass(frozen=True, slots=True)
class Text:
    """Characters that come one after another, each one of a set; `lark` says it as a literal or a pattern."""

    lark: str
    sets: tuple[Ranges, ...]


@dataclass(frozen=True, slots=True)
class Name:
    """A rule."""

    name: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """Parts that come one after another."""

    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Either:
    """One of several."""

    options: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part again and again; `how` as Lark writes it."""

    part: "Node"
    how: str


Node = Text | Name | Sequence | Either | Repeat


def parts_of(node: Node) -> tuple[Node, ...]:
    """What a node is made of."""
    match node:
        case Sequence(parts) | Either(parts):
            return parts
        case Repeat(part, _):
            return (part,)
    return ()


def leaves(node: Node) -> Iterator[Text | Name]:
    """The texts and names in a node."""
    if isinstance(node, Text | Name):
        yield node
    for part in parts_of(node):
        yield from leaves(part)


class TooLarge(Exception):
    """A grammar is too large to be looked through."""


class Shapes:
    """What the rules of a grammar can begin with, and be continued with where they are complete. Raises TooLarge."""

    def __init__(self, rules: Mapping[str, Node]) -> None:
        texts = (leaf for body in rules.values() for leaf in leaves(body) if isinstance(leaf, Text))
        ends = {end for text in texts for one in text.sets for low, high in one for end in (low, high + 1)}
        self._cuts = sorted(ends)
        self._num_looks = 0
        self._empty = dict.fromkeys(rules, False)
        self._first = dict.fromkeys(rules, 0)
        self._any = dict.fromkeys(rules, 0)
        self._more = dict.fromkeys(rules, 0)
        is_new = True
        while is_new:
            is_new = False
            for name, body in rules.items():
                known = self._known(name)
                self._empty[name] = self.may_be_empty(body)
                self._first[name] = self.first(body)
                self._any[name] = self.any(body)
                self._more[name] = self.more(body)
                is_new = is_new or known != self._known(name)

    def look(self) -> None:
        """Count a step of work that a large grammar takes too many of."""
        self._num_looks += 1
        if self._num_looks > _MAX_LOOKS:
            raise TooLarge

    def may_be_empty(self, node: Node) -> bool:
        """Whether it can stand for nothing."""
        self.look()
        match node:
            case Text(_, sets):
                return not sets
            case Name(name):
                return self._empty[name]
            case Sequence(parts):
                return all(map(self.may_be_empty, parts))
            case Either(options):
                return any(map(self.may_be_empty, options))
            case Repeat(part, how):
                return how in "*?" or how.startswith("{0,") or self.may_be_empty(part)

    def first(self, node: Node) -> int:
        """What it can begin with."""
        match node:
            case Text(_, sets):
                return self._mask(sets[0]) if sets else 0
            case Name(name):
                return self._first[name]
            case Sequence(parts):
                found = 0
                for part in parts:
                    found |= self.first(part)
                    if not self.may_be_empty(part):
                        break
                return found
        return self._union(self.first, node)

    def any(self, node: Node) -> int:
        """What can be in it anywhere."""
        self.look()
        match node:
            case Text(_, sets):
                found = 0
                for one in sets:
                    found |= self._mask(one)
                return found
            case Name(name):
                return self._any[name]
        return self._union(self.any, node)

    def more(self, node: Node) -> int:
        """What it can go on with where it could end, too; or more than that."""
        match node:
            case Text():
                return 0
            case Name(name):
                return self._more[name]
            case Sequence(parts):
                found = 0
                for part in reversed(parts):
                    found |= self.more(part)
                    if not self.may_be_empty(part):
                        break
                    found |= self.first(part)
                return found
            case Either(options):
                found = self._union(self.more, node)
                seen = 0
                for option in options:  # of two that begin alike the longer may go on
                    if seen & self.first(option):
                        return found | self.any(node)
                    seen |= self.first(option)
                return found
            case Repeat(part, how):
                return self.more(part) | (0 if how == "?" else self.first(part))

    def _known(self, name: str) -> tuple[bool, int, int, int]:
        return self._empty[name], self._first[name], self._any[name], self._more[name]

    def _union(self, of: Callable[[Node], int], node: Node) -> int:
        found = 0
        for part in parts_of(node):
            found |= of(part)
        return found

    def _mask(self, ranges: Ranges) -> int:
        found = 0
        for low, high in ranges:
            first, last = bisect_right(self._cuts, low), bisect_right(self._cuts, high)
            found |= (1 << (last + 1)) - (1 << first)
        return found
