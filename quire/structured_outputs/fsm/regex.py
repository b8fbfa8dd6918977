"""Patterns: the regular part of the syntax of Python's `re`, as trees. The whole text has to match.

Greedy and lazy repetition are the same language. Anchors may stand where they say nothing: at the ends.
"""

import re

from quire.errors import RequestError
from quire.structured_outputs.fsm.anchors import without_anchors
from quire.structured_outputs.fsm.charsets import NO_NEWLINE, bracket, escape
from quire.structured_outputs.fsm.limits import MAX_NESTING, too_complex
from quire.structured_outputs.fsm.nodes import Anchor, Chain, Chars, Choice, Node, Repeat, chain, choice, literal
from quire.structured_outputs.fsm.reading import Reader

_COUNTS = re.compile(r"([0-9]*)(?:(,)([0-9]*))?\}")
_MAX_COUNT = 10**6  # beyond what an automaton may have
_REFUSED = {
    "?=": "look-ahead",
    "?!": "look-ahead",
    "?<=": "look-behind",
    "?<!": "look-behind",
    "?>": "an atomic group",
    "?P=": "a backreference",
    "?(": "a condition",
}


def parse(pattern: str, name: str = "regex") -> Node:
    """The language of a pattern. Raises RequestError about the field `name` for one that is wrong, or not regular."""
    parser = _parser(pattern, name)
    return without_anchors(parser.whole(), parser.reader)


def parse_search(pattern: str, name: str, anything: Node) -> Node:
    """The texts in which the pattern is found somewhere: `anything` stands before and behind, but at anchors."""
    parser = _parser(pattern, name)
    return without_anchors(_searched(parser.whole(), Repeat(anything, 0, None)), parser.reader)


def _searched(node: Node, around: Node) -> Node:
    if isinstance(node, Choice):
        return choice(_searched(option, around) for option in node.options)
    parts = node.parts if isinstance(node, Chain) else (node,)
    before = [] if isinstance(parts[0], Anchor) and not parts[0].is_end else [around]
    behind = [] if isinstance(parts[-1], Anchor) and parts[-1].is_end else [around]
    return chain([*before, *parts, *behind])


def _parser(pattern: str, name: str) -> "_Parser":
    try:
        pattern.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the {name} has half a character at position {error.start}", name) from error
    return _Parser(Reader(pattern, name))


class _Parser:
    """Recursive descent: options, pieces, atoms."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._depth = 0

    def whole(self) -> Node:
        node = self._options()
        if self.reader.peek():
            raise self.reader.error("has a ) too many", self.reader.at)
        return node

    def _options(self) -> Node:
        options = [self._pieces()]
        while self.reader.skip("|"):
            options.append(self._pieces())
        return options[0] if len(options) == 1 else choice(options)

    def _pieces(self) -> Node:
        parts = []
        while self.reader.peek() not in ("", "|", ")"):
            parts.append(self._piece())
        return chain(parts)

    def _piece(self) -> Node:
        reader, at = self.reader, self.reader.at
        if self._counts() is not None:
            raise reader.error("repeats nothing", at)
        node = self._atom()
        at = reader.at
        counts = self._counts()
        if counts is None:
            return node
        if isinstance(node, Anchor):
            raise reader.error("repeats an anchor", at)
        if reader.skip("+"):
            raise reader.unsupported("a possessive repetition", at)
        reader.skip("?")  # lazy: the same language
        at = reader.at
        if self._counts() is not None:
            raise reader.error("repeats a repetition", at)
        return Repeat(node, *counts)

    def _counts(self) -> tuple[int, int | None] | None:
        """How often, where a repetition comes next, which is read then. A brace that is none is a character."""
        reader, at = self.reader, self.reader.at
        for sign, counts in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if reader.skip(sign):
                return counts
        found = reader.match(_COUNTS, 1) if reader.peek() == "{" and reader.peek(1) != "}" else None
        if found is None:
            return None
        least = self._count(found[1] or "0", at)
        most = least if found[2] is None else self._count(found[3], at) if found[3] else None
        if most is not None and most < least:
            raise reader.error("repeats at least more often than at most", at)
        return least, most

    def _count(self, digits: str, at: int) -> int:
        if len(digits) > 7 or int(digits) > _MAX_COUNT:
            raise too_complex(f"repetitions at position {at}", _MAX_COUNT, self.reader.name)
        return int(digits)

    def _atom(self) -> Node:
        reader, at = self.reader, self.reader.at
        char = reader.take()
        if char == "(":
            return self._group(at)
        if char == "[":
            return Chars(bracket(reader))
        if char == ".":
            return Chars(NO_NEWLINE)
        if char in "^$":
            return Anchor(at, is_end=char == "$")
        if char != "\\":
            return literal(char)
        if reader.peek() in ("A", "Z"):
            return Anchor(at, is_end=reader.take() == "Z")
        ranges = escape(reader, inside=False)
        (low, high), *more = ranges
        return literal(chr(low)) if low == high and not more else Chars(ranges)

    def _group(self, at: int) -> Node:
        self._open(at)
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise too_complex("groups within each other", MAX_NESTING, self.reader.name)
        node = self._options()
        self._depth -= 1
        if not self.reader.skip(")"):
            raise self.reader.error("has a ( that is not closed", at)
        return node

    def _open(self, at: int) -> None:
        """Reads what a group begins with. Raises for groups that are not regular, and for flags."""
        reader = self.reader
        for start, what in _REFUSED.items():
            if reader.skip(start):
                raise reader.unsupported(what, at)
        if reader.skip("?P<"):
            name = reader.until(">")
            if name is None or not name.isidentifier():
                raise reader.error("has a group whose name is none", at)
        elif reader.peek() == "?" and not reader.skip("?:"):
            raise reader.unsupported("a flag or an unknown group (?", at)
