"""Grammars in Lark, as llguidance reads them: what a caller may write, and schemas within them read strictly.

Not allowed is what would make an output something else than text of the grammar: special tokens, text that is taken
back (`stop`), and directives that are not known here.
"""

import json
import re
from collections.abc import Callable

from quire.errors import RequestError
from quire.structured import MAX_LITERAL
from quire.structured_outputs.json_schema.reader import Schema, read_schema

MAX_GRAMMAR = 32_768  # characters
MAX_RULES = 512
MAX_STACKED = (
    1024  # levels of parentheses of all rules, one on top of the other: llguidance follows them with its stack
)
_PARAM = "grammar"

_OPTIONS = frozenset({"no_forcing", "allow_initial_skip", "ignore_once"})
_PIECE = re.compile(
    r"""(?P<text>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<comment>//[^\n]*|\#[^\n]*)
    |(?P<pattern>/(?:[^/\\\n]|\\.)+/[imslux]*)
    |(?P<directive>%[a-z]+)
    |(?P<special><[^<>\n]*>)
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)


def checked_lark(text: str, write: Callable[[Schema], object]) -> str:
    """The same grammar with its JSON schemas read strictly. write: what is to stand for a schema.

    Raises RequestError. Whether the rest makes sense is known when it is compiled.
    """
    check_length(text)
    out: list[str] = []
    bare: list[str] = []  # without texts, patterns, comments and JSON
    place = 0
    while place < len(text):
        piece = _PIECE.match(text, place)
        assert piece is not None, "any character is a piece"
        place = piece.end()
        kind, written = piece.lastgroup, piece[0]
        if kind == "special":
            raise _refuse(text, piece.start(), f"special tokens such as {written!r:.100} cannot come; write text")
        if kind == "text" and len(written) > MAX_LITERAL:
            raise _refuse(text, piece.start(), f"a text must have at most {MAX_LITERAL:,} characters")
        if kind == "directive":
            written, place = _directive(text, written, place, write)
        if kind == "other":
            bare.append(written)
        if kind != "comment":
            out.append(written)
    _check_bare("".join(bare))
    return "".join(out)


def check_length(text: str) -> None:
    """Raises RequestError."""
    if len(text) > MAX_GRAMMAR:
        raise RequestError(f"grammar must have at most {MAX_GRAMMAR:,} characters", _PARAM)


def _directive(text: str, name: str, place: int, write: Callable[[Schema], object]) -> tuple[str, int]:
    """What stands for a directive and its JSON, and where it ends."""
    if name in ("%import", "%ignore"):
        return name, place
    if name not in ("%json", "%llguidance", "%regex"):
        raise _refuse(text, place, f"unknown directive {name!r:.100}")
    start = place + len(text[place:]) - len(text[place:].lstrip())
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise _refuse(text, start, f"{name} needs JSON: {error}") from error
    if name == "%llguidance" and not (isinstance(value, dict) and value.keys() <= _OPTIONS):
        raise _refuse(text, start, f"options are {', '.join(sorted(_OPTIONS))}")
    if name == "%json":
        value = write(read_schema(text[start:end], _PARAM))
    return f"{name} {json.dumps(value)} ", end


def check_stacked(num_levels: int) -> None:
    """num_levels: of all rules, each one more than its parentheses are deep. Raises RequestError."""
    if num_levels > MAX_STACKED:
        raise RequestError(
            f"grammar: rules and their parentheses have more than {MAX_STACKED:,} levels together", _PARAM
        )


def _check_bare(text: str) -> None:
    if text.count(":") > MAX_RULES:
        raise RequestError(f"grammar must have at most {MAX_RULES} rules", _PARAM)
    if re.search(r"\[[^\]]*\bstop\b", text):
        raise RequestError("grammar: stop= takes text back that was generated; use suffix= or lazy", _PARAM)
    num_levels = 1
    depth = deepest = 0
    for character in text:
        if character in "([":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]":
            depth = max(depth - 1, 0)
        elif character == ":":
            num_levels += deepest + 1
            deepest = depth
    check_stacked(num_levels + deepest)


def _refuse(text: str, place: int, why: str) -> RequestError:
    return RequestError(f"grammar, line {text.count(chr(10), 0, place) + 1}: {why}", _PARAM)
