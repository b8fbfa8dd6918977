"""Grammars in Lark, in llguidance's dialect.

Special tokens, `stop`, which removes generated text, and unknown directives are refused, because with them an output
could be no text of the grammar. Schemas within a grammar are read strictly.
"""

import json
import re
from collections.abc import Callable

from quire.errors import RequestError
from quire.params import MAX_LITERAL, StructuredOutputsParams
from quire.structured_outputs.json_schema.logic import Schema
from quire.structured_outputs.json_schema.reader import read_schema

MAX_GRAMMAR = 32_768  # characters
MAX_RULES = 512
MAX_TOTAL_NESTING = 1024  # levels of parentheses, summed over all rules; llguidance recurses through them
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


def checked_lark(params: StructuredOutputsParams, translate_schema: Callable[[Schema], object]) -> str:
    """The same grammar without comments. translate_schema: returns a checked schema in the format of llguidance.

    Raises RequestError. Other errors are found when the grammar is compiled.
    """
    text = params.text
    check_length(text)
    out: list[str] = []
    bare: list[str] = []  # the grammar without texts, patterns, comments and directives
    place = 0
    while place < len(text):
        piece = _PIECE.match(text, place)
        assert piece is not None, "the pattern matches any character"
        place = piece.end()
        kind, written = piece.lastgroup, piece[0]
        if kind == "special":
            raise _error(text, piece.start(), f"special tokens such as {written!r:.100} are not supported; use text")
        if kind == "text" and len(written) > MAX_LITERAL:
            raise _error(text, piece.start(), f"a text must have at most {MAX_LITERAL:,} characters")
        if kind == "directive":
            written, place = _directive(
                text, written, place, lambda one: translate_schema(read_schema(one, _PARAM, params))
            )
        if kind == "other":
            bare.append(written)
        if kind != "comment":
            out.append(written)
    _check_bare("".join(bare))
    return "".join(out)


def check_length(text: str) -> None:
    """Raises RequestError for a grammar of more than MAX_GRAMMAR characters."""
    if len(text) > MAX_GRAMMAR:
        raise RequestError(f"grammar must have at most {MAX_GRAMMAR:,} characters", _PARAM)


def _directive(text: str, name: str, place: int, translate_schema: Callable[[str], object]) -> tuple[str, int]:
    """The translation of a directive with its JSON, and the position at which it ends. Raises RequestError."""
    if name in ("%import", "%ignore"):
        return name, place
    if name not in ("%json", "%llguidance", "%regex"):
        raise _error(text, place, f"unknown directive {name!r:.100}")
    start = place + len(text[place:]) - len(text[place:].lstrip())
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise _error(text, start, f"{name} needs JSON: {error}") from error
    if name == "%llguidance" and not (isinstance(value, dict) and value.keys() <= _OPTIONS):
        raise _error(text, start, f"options are {', '.join(sorted(_OPTIONS))}")
    if name == "%json":
        value = translate_schema(text[start:end])
    return f"{name} {json.dumps(value)} ", end


def check_total_nesting(num_levels: int) -> None:
    """Raises RequestError. num_levels: sum over all rules of 1 + the depth of parentheses."""
    if num_levels > MAX_TOTAL_NESTING:
        raise RequestError(
            f"grammar: rules and their parentheses have more than {MAX_TOTAL_NESTING:,} levels together", _PARAM
        )


def _check_bare(text: str) -> None:
    if text.count(":") > MAX_RULES:
        raise RequestError(f"grammar must have at most {MAX_RULES} rules", _PARAM)
    if re.search(r"\[[^\]]*\bstop\b", text):
        raise RequestError("grammar: stop= removes text that was generated; use suffix= or lazy", _PARAM)
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
    check_total_nesting(num_levels + deepest)


def _error(text: str, place: int, why: str) -> RequestError:
    return RequestError(f"grammar, line {text.count(chr(10), 0, place) + 1}: {why}", _PARAM)
