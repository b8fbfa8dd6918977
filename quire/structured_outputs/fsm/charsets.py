r"""Character classes of patterns: escapes and what stands in brackets. ASCII: \d is [0-9], \w [A-Za-z0-9_], \s blanks.

So it is in JSON schemas, and automata over UTF-8 stay small.
"""

from quire.structured_outputs.fsm.limits import MAX_RANGES, too_complex
from quire.structured_outputs.fsm.nodes import Ranges, negation, union
from quire.structured_outputs.fsm.reading import Reader

DIGITS = union([(0x30, 0x39)])
WORD = union([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
BLANKS = union([(0x09, 0x0D), (0x20, 0x20)])
NO_NEWLINE = negation(union([(0x0A, 0x0A)]))

_CLASSES = {"d": DIGITS, "w": WORD, "s": BLANKS}
_CLASSES |= {name.upper(): negation(ranges) for name, ranges in _CLASSES.items()}
_CONTROLS = {"a": 7, "b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_ANCHORS = {"b": "a word boundary", "B": "a word boundary"}


def escape(reader: Reader, *, inside: bool) -> Ranges:
    r"""What the escape behind a backslash, which has been read, stands for. inside: in brackets; \b is a character."""
    at = reader.at - 1
    name = reader.take()
    if not name:
        raise reader.error("ends in a backslash", at)
    if name in _CLASSES:
        return _CLASSES[name]
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
    """The class behind an opening bracket, which has been read."""
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
    return negation(members) if negated else members


def _member(reader: Reader, opened: int) -> Ranges:
    char = reader.take()
    if not char:
        raise reader.error("has a [ that is not closed", opened)
    return escape(reader, inside=True) if char == "\\" else _one(ord(char))


def _range(reader: Reader, low: Ranges, high: Ranges, at: int) -> Ranges:
    ends = [one[0][0] for one in (low, high) if len(one) == 1 and one[0][0] == one[0][1]]
    if len(ends) != 2 or ends[0] > ends[1]:
        raise reader.error("has a range that is none", at)
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
        raise reader.error(f"has an escape \\{name} without {_HEX_DIGITS[name]} digits of a character", at)
    return code


def _octal(reader: Reader, first: str, at: int, *, inside: bool) -> int:
    """Octal are: what begins with 0, and three octal digits. In brackets, all."""
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
        raise reader.error("has an octal escape that is none", at)
    return int(digits, 8)
