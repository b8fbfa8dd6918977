"""Arguments of tool calls, converted to JSON text as they arrive.

The functions return False where the text ends or is not what they read. What they have written by then stays.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Protocol

from quire.chat.formats import TaggedArguments
from quire.chat.reader import Markers, Reader, Reading

Write = Callable[[str], object]


class _Atom(Protocol):
    """See `_nested_value`."""

    def __call__(self, reader: Reader, write: Write, *, is_key: bool) -> Reading[bool]: ...


MAX_KEY = 1024  # characters
_MAX_WORD = 512  # characters of a number or a constant

_WORD = re.compile(r"[-+.\w]*", re.ASCII)  # a number, true, false, null
_WORDS = re.compile(r"[-+.\w,: \n\r\t]*", re.ASCII)  # and what stands between values
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPED = frozenset('"\\/bfnrtu')


def json_value(reader: Reader, write: Write) -> Reading[bool]:
    """Copies one JSON value. In strings, control characters are escaped, and escapes that JSON lacks are undone.

    Within the value only brackets, strings and characters are checked: another error of the model stays in the text.
    """
    depth = 0
    while True:
        character = yield from reader.peek()
        if character == '"':
            reader.at += 1
            write('"')
            if not (yield from _rest_of_string(reader, write)):
                return False
        elif character and character in "{}[]":
            depth += 1 if character in "{[" else -1
            if depth < 0:
                return False
            reader.at += 1
            write(character)
        else:
            word = reader.available(_WORDS) if depth else (yield from reader.run(_WORD, _MAX_WORD))
            if not word:
                return False
            write(word)
        if depth == 0:
            return True


def _rest_of_string(reader: Reader, write: Write) -> Reading[bool]:
    """Copies a JSON string from behind its first quote to its last one."""
    while True:
        character = yield from reader.peek()
        if not character:
            return False
        plain = reader.available(_PLAIN)
        if plain:
            write(plain)
            continue
        reader.at += 1
        if character == '"':
            write(character)
            return True
        if character == "\\":
            escaped = yield from reader.peek()
            if not escaped:
                return False
            if escaped in _ESCAPED:
                reader.at += 1
                write(character + escaped)
        else:
            write(_within_string(character))


def _within_string(text: str) -> str:
    """A text as it is written within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def json_string(reader: Reader, most: int) -> Reading[str | None]:
    """Consumes a JSON string. Returns its value; None if it is longer than `most` characters, or no JSON string."""
    pieces: list[str] = []
    if not (yield from reader.literal('"')) or not (yield from _rest_of_string(reader, pieces.append)):
        return None
    try:
        value = str(json.loads('"' + "".join(pieces)))
    except ValueError:
        return None
    return value if len(value) <= most else None


_IDENTIFIER = re.compile(r"\w*")
_PYTHON_WORD = re.compile(r"[-+.\w]*", re.ASCII)
_BARE_KEY = re.compile(r"[^:,{}\[\]<\"\n]*")
_BARE_VALUE = re.compile(r"[^,{}\[\]<\"\n]*")
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}


def begins_keyword_arguments(reader: Reader) -> Reading[bool]:
    """Whether `)` or `name=` follows. The reader holds its text; some of it is consumed."""
    yield from reader.space()
    if (yield from reader.peek()) == ")":
        return True
    if not (yield from reader.run(_IDENTIFIER, MAX_KEY)):
        return False
    yield from reader.space()
    return (yield from reader.peek()) == "="


def keyword_arguments(reader: Reader, write: Write) -> Reading[bool]:
    """Converts the keyword arguments of a Python call, up to the closing parenthesis, to a JSON object."""
    write("{")
    lead = ""
    while True:
        yield from reader.space()
        if (yield from reader.literal(")")):
            write("}")
            return True
        name = yield from reader.run(_IDENTIFIER, MAX_KEY)
        yield from reader.space()
        if not name or not (yield from reader.literal("=")):
            return False
        write(f'{lead}"{name}": ')
        lead = ", "
        if not (yield from python_value(reader, write)):
            return False
        yield from reader.space()
        if not (yield from reader.literal(",")) and (yield from reader.peek()) != ")":
            return False


def python_value(reader: Reader, write: Write) -> Reading[bool]:
    """Converts a Python literal to JSON: text, number, True, False, None, list, tuple, dict. JSON is taken, too."""
    return (yield from _nested_value(reader, write, _python_atom))


def quoted_value(reader: Reader, quote: str, write: Write) -> Reading[bool]:
    """Converts a value in which strings stand between two texts `quote`, and keys have no quotes, to JSON.

    A word that is no number and no constant is a string.
    """
    end = Markers((quote,))

    def atom(reader: Reader, write: Write, *, is_key: bool) -> Reading[bool]:
        if (yield from reader.literal(quote)):
            return (yield from _text_value(reader, end, _TEXT, write))
        if (yield from reader.peek()) in ("'", '"'):
            return (yield from _python_atom(reader, write, is_key=is_key))
        word = (yield from reader.run(_BARE_KEY if is_key else _BARE_VALUE, MAX_KEY)).strip()
        if not word:
            return False
        number = None if is_key else _CONSTANTS.get(word) or _json_number(word)
        write(number or json.dumps(word, ensure_ascii=False))
        return True

    return (yield from _nested_value(reader, write, atom))


def _nested_value(reader: Reader, write: Write, atom: _Atom) -> Reading[bool]:
    """Converts a value with lists and dicts. atom: converts a text, a number or a constant, which may be a key."""
    closing: list[str] = []  # of the open brackets
    lead = ""  # a comma before the next item
    is_key = False  # whether the next item is a key of a dict
    while True:
        yield from reader.space()
        character = yield from reader.peek()
        if character in _CLOSING:
            reader.at += 1
            write(lead + character.replace("(", "["))
            closing.append(_CLOSING[character])
            lead, is_key = "", character == "{"
            continue
        if closing and character == closing[-1]:  # behind an opening bracket, or a comma
            reader.at += 1
            write(closing.pop().replace(")", "]"))
        else:
            write(lead)
            if not (yield from atom(reader, write, is_key=is_key)):
                return False
            if is_key:
                yield from reader.space()
                if not (yield from reader.literal(":")):
                    return False
                write(": ")
                lead, is_key = "", False
                continue
        yield from _closed_brackets(reader, write, closing)
        if not closing:
            return True
        if not (yield from reader.literal(",")):
            return False
        lead, is_key = ", ", closing[-1] == "}"


def _closed_brackets(reader: Reader, write: Write, closing: list[str]) -> Reading[None]:
    """Consumes the closing brackets behind a value."""
    while closing:
        yield from reader.space()
        if not (yield from reader.literal(closing[-1])):
            return
        write(closing.pop().replace(")", "]"))


def _python_atom(reader: Reader, write: Write, *, is_key: bool) -> Reading[bool]:
    """Converts a text, a number or a constant."""
    character = yield from reader.peek()
    if character and character in "'\"":
        return (yield from _python_string(reader, character, write))
    word = yield from reader.run(_PYTHON_WORD, _MAX_WORD)
    number = _CONSTANTS.get(word) or _json_number(word)
    if number is None:
        return False
    write(f'"{word}"' if is_key else number)
    return True


_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")


def _json_number(word: str) -> str | None:
    """A number of Python as JSON writes it. None if it is none, or not finite."""
    if _NUMBER.fullmatch(word):
        return word
    try:
        return str(int(word, 0))
    except ValueError:
        pass
    try:
        return json.dumps(float(word), allow_nan=False)
    except ValueError:
        return None


_PLAIN_PYTHON = {quote: re.compile(rf"[^\\{quote}]*") for quote in "'\""}
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_NUM_DIGITS = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile(r"[0-9a-fA-F]*")


def _python_string(reader: Reader, quote: str, write: Write) -> Reading[bool]:
    """Converts a text in single or triple quotes."""
    end = quote * 3 if (yield from reader.literal(quote * 3)) else quote
    reader.at += len(end) == 1
    write('"')
    while True:
        character = yield from reader.peek()
        plain = reader.available(_PLAIN_PYTHON[quote])
        if plain:
            write(_within_string(plain))
        elif not character:
            return False
        elif character == "\\":
            reader.at += 1
            write((yield from _escape(reader)))
        elif (yield from reader.literal(end)):
            write('"')
            return True
        else:
            reader.at += 1
            write(_within_string(quote))


def _escape(reader: Reader) -> Reading[str]:
    """Consumes an escape of Python behind its backslash. Returns it as it is written within a JSON string."""
    letter = yield from reader.peek()
    reader.at += len(letter)
    if letter not in _NUM_DIGITS:
        known = letter in _LETTERS or letter in "'\"\\"
        return _within_string(_LETTERS.get(letter, letter) if known else f"\\{letter}")
    digits = yield from reader.run(_HEX, _NUM_DIGITS[letter])
    code = int(digits or "fffd", 16)
    if 0xD800 <= code < 0xE000:  # half of a character, which only an escape can write
        return f"\\u{code:04x}"
    return _within_string(chr(code) if code < 0x110000 else "\ufffd")


def tagged_arguments(
    reader: Reader, style: TaggedArguments, ends: tuple[str, ...], schema: Mapping[str, object], write: Write
) -> Reading[bool]:
    """Converts arguments between tags, up to one of the texts `ends`, to a JSON object.

    schema: of the arguments. It says which of them are texts: only those are written as they are. An argument that it
    does not name is a text. Text between arguments is dropped.
    """
    properties = schema.get("properties")
    schemas = properties if isinstance(properties, Mapping) else {}
    kinds: dict[str, frozenset[str]] = {}  # by name of an argument
    between, key_end = Markers((style.key_begin, *ends)), Markers((style.key_end.strip(),))
    value_end = Markers((style.value_end.strip(), style.value_end.rstrip()))
    write("{")
    lead = ""
    while True:
        text, marker = yield from reader.until(between)
        if marker in ends:
            write("}")
            return True
        if not marker:
            if text:
                continue
            return False
        key = yield from _whole_text(reader, key_end)
        if key is None:
            return False
        if style.value_begin:
            yield from reader.space()
            if not (yield from reader.literal(style.value_begin)):
                return False
        elif style.key_end.endswith("\n"):
            yield from reader.literal("\n")
        write(f"{lead}{json.dumps(key, ensure_ascii=False)}: ")
        lead = ", "
        if key not in kinds:
            kinds[key] = kinds_of(schemas.get(key), schema)
        convert = _text_value if kinds[key] == _TEXT else _typed_value
        if not (yield from convert(reader, value_end, kinds[key], write)):
            return False


def _whole_text(reader: Reader, end: Markers) -> Reading[str | None]:
    """The text up to a marker, which is consumed; None if the text ends before."""
    pieces: list[str] = []
    while True:
        text, marker = yield from reader.until(end)
        pieces.append(text)
        if marker:
            return "".join(pieces)
        if not text:
            return None


def _text_value(reader: Reader, end: Markers, _kinds: frozenset[str], write: Write) -> Reading[bool]:
    write('"')
    while True:
        text, marker = yield from reader.until(end)
        if text:
            write(_within_string(text))
        if marker:
            write('"')
        if marker or not text:
            return bool(marker)


def _typed_value(reader: Reader, end: Markers, kinds: frozenset[str], write: Write) -> Reading[bool]:
    """An argument that may be no text. In a JSON value, `end` within a string does not end the argument."""
    pieces: list[str] = []
    yield from reader.space()
    first = yield from reader.peek()
    if first and first in '{["' and not kinds & _TEXT:
        yield from json_value(reader, pieces.append)
    rest = yield from _whole_text(reader, end)
    pieces.append(rest or "")
    value = "".join(pieces)
    write(value if rest is None else as_json(value, kinds))
    return rest is not None


_TEXT = frozenset({"string"})
_NUMBERS = frozenset({"integer", "number"})
_KINDS: Mapping[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null",
}  # fmt: skip
_KINDS_BY_FIRST = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}


def kinds_of(schema: object, root: Mapping[str, object]) -> frozenset[str]:
    """The types of JSON that a schema allows, as far as it says so; "string" if it does not. root: for references."""
    kinds: set[str] = set()
    pending, seen = [schema], set[int]()
    while pending:
        one = pending.pop()
        if not isinstance(one, Mapping) or id(one) in seen:
            continue
        seen.add(id(one))
        match one:
            case {"$ref": str(reference)}:
                pending.append(_target(reference, root))
            case {"type": str(kind)}:
                kinds.add(kind)
            case {"type": [*names]}:
                kinds.update(map(str, names))
            case {"enum": [*values]}:
                kinds.update(_KINDS[type(value)] for value in values)
            case {"const": value}:
                kinds.add(_KINDS[type(value)])
            case {"anyOf": [*options]} | {"oneOf": [*options]} | {"allOf": [*options]}:
                pending += options
            case {"properties": _}:
                kinds.add("object")
            case {"items": _}:
                kinds.add("array")
    return frozenset(kinds) or _TEXT


def _target(reference: str, root: Mapping[str, object]) -> object:
    value: object = root
    for step in reference.split("/")[1:]:
        value = value.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(value, Mapping) else None
    return value


def as_json(text: str, kinds: frozenset[str]) -> str:
    """A value between tags as JSON: JSON as it is, a Python literal converted, anything else as a JSON string.

    kinds: types that the schema allows. If it allows strings, JSON of a type that it does not allow is a string, too.
    """
    bare = text.strip()
    try:
        json.loads(bare, parse_constant=_refuse)
        value = bare
    except (ValueError, RecursionError):
        value = _python_as_json(bare)
    kind = _KINDS_BY_FIRST.get(value[:1], "number")
    is_allowed = kinds & _NUMBERS if kind == "number" else kind in kinds
    if not value or (kinds & _TEXT and (kind == "string" or not is_allowed)):
        return json.dumps(text, ensure_ascii=False)
    return value


def is_json_object(text: str) -> bool:
    """Whether a text is one JSON object."""
    try:
        return isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def _refuse(constant: str) -> object:
    raise ValueError(constant)


def _python_as_json(text: str) -> str:
    """A Python literal as JSON; "" if it is none."""
    reader, pieces = Reader(), list[str]()
    reader.feed(text)
    reader.ended = True
    try:
        next(python_value(reader, pieces.append))
    except StopIteration as done:
        return "".join(pieces) if done.value and reader.at == len(text) else ""
    raise AssertionError("a reader whose text has ended does not wait")
