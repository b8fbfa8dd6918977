"""Parser of patterns to trees, for the regular part of the syntax of Python's `re`.

A pattern matches the whole text. Greedy and lazy repetition have the same language. Anchors are allowed at the ends.
"""

import re

from quire.errors import RequestError
from quire.structured_outputs.fsm.nodes import (
    EMPTY,
    MAX_NESTING,
    MAX_RANGES,
    SEARCHED_FIELD,
    Anchor,
    Chain,
    Chars,
    Choice,
    Node,
    Ranges,
    Repeat,
    chain,
    choice,
    intersection,
    literal,
    negation,
    too_complex,
    union,
)


class Reader:
    """A cursor over the characters of a pattern. name: the field of the pattern, for errors.

    is_ecma: the pattern is one of a JSON schema, with the white space and line ends of ECMA-262.
    """

    def __init__(self, text: str, name: str, *, is_ecma: bool = False) -> None:
        self._text = text
        self.name = name
        self.is_ecma = is_ecma
        self.at = 0

    def peek(self, offset: int = 0) -> str:
        """The character `offset` after the next one, which is not consumed; "" at the end."""
        return self._text[self.at + offset : self.at + offset + 1]

    def take(self) -> str:
        """Consume the next character and return it; "" at the end."""
        char = self.peek()
        self.at += len(char)
        return char

    def skip(self, text: str) -> bool:
        """Whether `text` is next. If so, it is consumed."""
        found = self._text.startswith(text, self.at)
        self.at += len(text) if found else 0
        return found

    def match(self, pattern: re.Pattern[str], offset: int) -> re.Match[str] | None:
        """The match of `pattern` at `offset` after the next character, or None. The text up to its end is consumed."""
        found = pattern.match(self._text, self.at + offset)
        if found is not None:
            self.at = found.end()
        return found

    def until(self, end: str) -> str | None:
        """Consume the text up to `end`, and `end`. Returns the text; None if there is no `end`."""
        stop = self._text.find(end, self.at)
        if stop < 0:
            return None
        found = self._text[self.at : stop]
        self.at = stop + len(end)
        return found

    def error(self, what: str, at: int) -> RequestError:
        """The error of an invalid pattern."""
        return RequestError(f"the {self.name} {what}, at position {at}", self.name)

    def unsupported(self, what: str, at: int) -> RequestError:
        """The error of a pattern with a part that is not regular or not supported."""
        who = "stop_regex" if self.name == SEARCHED_FIELD else "the fsm backend"
        return RequestError(f"the {self.name} has {what} at position {at}, which {who} does not support", self.name)


DIGITS = union([(0x30, 0x39)])
WORD = union([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
BLANKS = union([(0x09, 0x0D), (0x20, 0x20)])
NO_NEWLINE = negation(union([(0x0A, 0x0A)]))

_CLASSES = {"d": DIGITS, "w": WORD, "s": BLANKS}
_CLASSES |= {name.upper(): negation(ranges) for name, ranges in _CLASSES.items()}
# Patterns of JSON schema (ECMA-262, 12.2, 12.3, 22.2.2.9). All white space of ECMA-262 and Python is outside of \S.
_ECMA_BLANKS = union(
    [(0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)]
    + [(code, code) for code in (0x202F, 0x205F, 0x3000)]
)
_NO_BLANKS = negation(union([*_ECMA_BLANKS, (0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF)]))
_ECMA_CLASSES = _CLASSES | {"s": _ECMA_BLANKS, "S": _NO_BLANKS}
_ECMA_NO_NEWLINE = negation(union([(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]))
_CONTROLS = {"a": 7, "b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_ANCHORS = {"b": "a word boundary", "B": "a word boundary"}


def escape(reader: Reader, *, inside: bool) -> Ranges:
    r"""The set of an escape; its backslash has been consumed. inside: within brackets, where \b is a character."""
    at = reader.at - 1
    name = reader.take()
    if not name:
        raise reader.error("ends in a backslash", at)
    if name in _CLASSES:
        return (_ECMA_CLASSES if reader.is_ecma else _CLASSES)[name]
    if name in _ANCHORS and not (inside and name == "b"):
        raise reader.unsupported(f"{_ANCHORS[name]} (\\{name})", at)
    if name in _CONTROLS:
        return _one(_CONTROLS[name])
    if name in _HEX_DIGITS:
        return _one(_hexadecimal(reader, name, at))
    if name.isdecimal() and name.isascii():
        return _one(_octal(reader, name, at, inside=inside))
    if name.isalpha() and name.isascii():
        raise reader.unsupported(f"the escape \\{name}", at)
    return _one(ord(name))


def bracket(reader: Reader) -> Ranges:
    """The set of a character class; its opening bracket has been consumed."""
    at = reader.at - 1
    negated = reader.skip("^")
    ranges: list[tuple[int, int]] = []
    first = reader.at
    while not (reader.peek() == "]" and reader.at > first):
        low = _member(reader, at)
        if reader.peek() == "-" and reader.peek(1) not in ("]", ""):
            start = reader.at
            reader.skip("-")
            low = _range(reader, low, _member(reader, at), start)
        ranges += low
        if len(ranges) > MAX_RANGES:
            raise too_complex("ranges in one class", MAX_RANGES, reader.name)
    reader.skip("]")
    members = union(ranges)
    if not negated:
        return members
    others = negation(members)
    for class_, negative in ((_ECMA_BLANKS, _NO_BLANKS), (_NO_BLANKS, _ECMA_BLANKS)) if reader.is_ecma else ():
        if (
            intersection(members, class_) == class_
        ):  # a code point that is white space in one language only is in neither
            others = intersection(others, negative)
    return others


def _member(reader: Reader, opened: int) -> Ranges:
    char = reader.take()
    if not char:
        raise reader.error("has a [ that is not closed", opened)
    return escape(reader, inside=True) if char == "\\" else _one(ord(char))


def _range(reader: Reader, low: Ranges, high: Ranges, at: int) -> Ranges:
    ends = [one[0][0] for one in (low, high) if len(one) == 1 and one[0][0] == one[0][1]]
    if len(ends) != 2 or ends[0] > ends[1]:
        raise reader.error("has an invalid range", at)
    return union([(ends[0], ends[1])])


def _one(code: int) -> Ranges:
    return ((code, code),)


def _hexadecimal(reader: Reader, name: str, at: int) -> int:
    digits = "".join(reader.take() for _ in range(_HEX_DIGITS[name]))
    try:
        code = int(digits, 16) if len(digits) == _HEX_DIGITS[name] and digits.isalnum() else -1
    except ValueError:
        code = -1
    if not 0 <= code <= 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise reader.error(f"has an escape \\{name} without {_HEX_DIGITS[name]} hexadecimal digits of a character", at)
    return code


def _octal(reader: Reader, first: str, at: int, *, inside: bool) -> int:
    """The code of an octal escape: a leading 0 or three octal digits. In brackets every number is octal."""
    digits = first
    following = [reader.peek(offset) for offset in (0, 1)]
    if first == "0" or inside:
        while len(digits) < 3 and reader.peek() and reader.peek() in "01234567":
            digits += reader.take()
    elif first in "123" and all(char and char in "01234567" for char in following):
        digits += reader.take() + reader.take()
    else:
        raise reader.unsupported(f"a backreference (\\{first})", at)
    if not all(digit in "01234567" for digit in digits) or int(digits, 8) > 0o377:
        raise reader.error("has an invalid octal escape", at)
    return int(digits, 8)


def without_anchors(node: Node, reader: Reader, *, first: bool = True, last: bool = True) -> Node:
    """The tree without anchors. first, last: no node precedes, follows it. Raises RequestError for other anchors."""
    match node:
        case Anchor():
            if not (last if node.is_end else first):
                what = (
                    "an end ($) that is not at its end" if node.is_end else "a beginning (^) that is not at its start"
                )
                raise reader.unsupported(what, node.at)
            return EMPTY
        case Chain(parts):
            solid = [i for i, part in enumerate(parts) if not isinstance(part, Anchor)]
            start, stop = (solid[0], solid[-1]) if solid else (len(parts), -1)
            return chain(
                without_anchors(part, reader, first=first and i <= start, last=last and i >= stop)
                for i, part in enumerate(parts)
            )
        case Choice(options):
            return choice(without_anchors(option, reader, first=first, last=last) for option in options)
        case Repeat(inner, least, most):
            once = most == 1
            return Repeat(without_anchors(inner, reader, first=first and once, last=last and once), least, most)
    return node


_COUNTS = re.compile(r"([0-9]*)(?:(,)([0-9]*))?\}")
_MAX_COUNT = 10**6  # more than an automaton may have
_UNSUPPORTED_GROUPS = {
    "?=": "look-ahead",
    "?!": "look-ahead",
    "?<=": "look-behind",
    "?<!": "look-behind",
    "?>": "an atomic group",
    "?P=": "a backreference",
    "?(": "a condition",
}


def parse(pattern: str, name: str = "regex") -> Node:
    """The tree of a pattern. Raises RequestError about the field `name` if it is invalid or not regular."""
    parser = _parser(pattern, name)
    return without_anchors(parser.whole(), parser.reader)


def parse_search(pattern: str, name: str, anything: Node) -> Node:
    """The tree of texts that contain a match of a pattern of JSON schema.

    They have repeated `anything` before and after it, except at anchors.
    """
    parser = _parser(pattern, name, is_ecma=True)
    around = Repeat(anything, 0, None)
    return without_anchors(_searched(parser.whole(), around, around), parser.reader)


def parse_end(pattern: str, name: str, anything: Node) -> Node:
    """The tree of texts that end with a match of a pattern.

    They have repeated `anything` before it, except at an anchor. An anchor at its end has no effect.
    """
    parser = _parser(pattern, name)
    return without_anchors(_searched(parser.whole(), Repeat(anything, 0, None), EMPTY), parser.reader)


def _searched(node: Node, before: Node, behind: Node) -> Node:
    """The node with others before and behind each option, except at its anchors."""
    if isinstance(node, Choice):
        return choice(_searched(option, before, behind) for option in node.options)
    parts = node.parts if isinstance(node, Chain) else (node,)
    ahead = [] if isinstance(parts[0], Anchor) and not parts[0].is_end else [before]
    beyond = [] if isinstance(parts[-1], Anchor) and parts[-1].is_end else [behind]
    return chain([*ahead, *parts, *beyond])


def _parser(pattern: str, name: str, *, is_ecma: bool = False) -> "_Parser":
    try:
        pattern.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the {name} has half a character at position {error.start}", name) from error
    return _Parser(Reader(pattern, name, is_ecma=is_ecma))


class _Parser:
    """Recursive descent parser: options, pieces, atoms."""

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
            raise reader.error("has a repetition of a repetition", at)
        return Repeat(node, *counts)

    def _counts(self) -> tuple[int, int | None] | None:
        """Consume a repetition and return (least, most); None if none is next. Another brace is a plain character."""
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
            raise reader.error("has a repetition whose minimum is above its maximum", at)
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
            return Chars(_ECMA_NO_NEWLINE if reader.is_ecma else NO_NEWLINE)
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
            raise too_complex("levels of nested groups", MAX_NESTING, self.reader.name)
        node = self._options()
        self._depth -= 1
        if not self.reader.skip(")"):
            raise self.reader.error("has a ( that is not closed", at)
        return node

    def _open(self, at: int) -> None:
        """Consume the beginning of a group. Raises RequestError for groups that are not regular, and for flags."""
        reader = self.reader
        for start, what in _UNSUPPORTED_GROUPS.items():
            if reader.skip(start):
                raise reader.unsupported(what, at)
        if reader.skip("?P<"):
            name = reader.until(">")
            if name is None or not name.isidentifier():
                raise reader.error("has a group with an invalid name", at)
        elif reader.peek() == "?" and not reader.skip("?:"):
            raise reader.unsupported("a flag or an unknown group (?", at)
