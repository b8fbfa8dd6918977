"""Grammars in Lark, in llguidance's dialect.

`stop`, which removes generated text, and unknown directives are refused, because with them an output could be no text
of the grammar. Schemas within a grammar are read strictly. Directives of quire's own write special tokens and the
arguments of tool calls.
"""

import json
import re
from collections.abc import Callable, Mapping, Set
from types import MappingProxyType

from quire.errors import RequestError
from quire.params import MAX_LITERAL, StructuredOutputsParams
from quire.structured_outputs.call_arguments import ArgumentGrammars, Tags, written_parts
from quire.structured_outputs.json_schema.logic import Schema
from quire.structured_outputs.json_schema.reader import read_schema
from quire.structured_outputs.vocabulary import SpecialTokens

MAX_GRAMMAR = 32_768  # characters
MAX_RULES = 512
MAX_TOTAL_NESTING = 1024  # levels of parentheses, summed over all rules; llguidance recurses through them
_PARAM = "grammar"

_NO_TOKEN = r"\x01"  # which models do not write
_WITH_SCHEMAS = frozenset({"%json", "%tagged", "%quoted", "%keywords"})
_MAX_SPACE = 256  # characters before the JSON of a directive
_OPTIONS = frozenset({"no_forcing", "allow_initial_skip", "ignore_once"})
_NEEDED: Mapping[str, str] = MappingProxyType(  # directive -> its JSON
    {
        "%json": "a schema",
        "%tagged": "an object with a schema",
        "%quoted": "an object with a schema and the text quote",
        "%keywords": "a schema",
        "%special": f"a text of at most {MAX_LITERAL:,} characters",
        "%tokens": 'texts of special tokens, {"only": [...]} or {"except": [...]}',
        "%llguidance": f"an object; options are {', '.join(sorted(_OPTIONS))}",
        "%regex": "a pattern",
    }
)
_PIECE = re.compile(
    r"""(?P<text>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<comment>//[^\n]*|\#[^\n]*)
    |(?P<pattern>/(?:[^/\\\n]|\\.)+/[imslux]*)
    |(?P<directive>%[a-z]+)
    |(?P<special><[^<>\n]*>)
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)


def checked_lark(
    params: StructuredOutputsParams,
    translate_schema: Callable[[Schema], object],
    special: SpecialTokens,
) -> str:
    """The same grammar without comments, and with quire's directives replaced.

    translate_schema: returns a checked schema in the format of llguidance. special_id: returns the id of the special
    token with a text, if there is one. RequestError. Other errors are found when the grammar is compiled.
    """
    text = params.text
    directives = _Directives(params, translate_schema, special)
    num_in_schemas = 0  # characters of schemas, which have limits of their own
    out: list[str] = []
    bare: list[str] = []  # the grammar without texts, patterns, comments and directives
    place = 0
    while place < len(text):
        piece = _PIECE.match(text, place)
        assert piece is not None, "the pattern matches any character"
        place = piece.end()
        kind, written = piece.lastgroup, piece[0]
        if kind == "special":
            raise _error(
                text, piece.start(), f"special tokens such as {written!r:.100} are not supported; use %special"
            )
        if kind == "text" and len(written) > MAX_LITERAL:
            raise _error(text, piece.start(), f"a text must have at most {MAX_LITERAL:,} characters")
        if kind == "directive" and written not in ("%import", "%ignore"):
            name = written
            written, end = directives.replaced(text, name, place)
            num_in_schemas += end - place if name in _WITH_SCHEMAS else 0
            place = end
        if kind == "other":
            bare.append(written)
        if kind != "comment":
            out.append(written)
    check_length(len(text) - num_in_schemas)
    _check_bare("".join(bare))
    return "\n".join(["".join(out), *directives.arguments.definitions])


def check_length(num_characters: int) -> None:
    """Raises RequestError for a grammar of more than MAX_GRAMMAR characters."""
    if num_characters > MAX_GRAMMAR:
        raise RequestError(
            f"grammar must have at most {MAX_GRAMMAR:,} characters without its schemas, not {num_characters:,}; "
            "shorten it, or make fewer tools strict",
            _PARAM,
        )


class _Directives:
    """Replaces directives with JSON by Lark of llguidance. See `checked_lark` for the arguments."""

    def __init__(
        self,
        params: StructuredOutputsParams,
        translate_schema: Callable[[Schema], object],
        special: SpecialTokens,
    ) -> None:
        self.arguments = ArgumentGrammars(translate_schema)
        self._params = params
        self._translate_schema = translate_schema
        self._special = special

    def replaced(self, text: str, name: str, place: int) -> tuple[str, int]:
        """What a directive stands for, and the position behind its JSON. Raises RequestError."""
        if name not in _NEEDED:
            raise _error(text, place, f"unknown directive {name!r:.100}")
        start = place + len(text[place : place + _MAX_SPACE]) - len(text[place : place + _MAX_SPACE].lstrip())
        try:
            value, end = json.JSONDecoder().raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            raise _error(text, start, f"{name} needs JSON: {error}") from error
        try:
            written = self._written(name, value)
        except RequestError as error:
            schema = value.get("schema") if name in ("%tagged", "%quoted") else value
            about = schema.get("x-name") if isinstance(schema, dict) else None
            raise RequestError(f"{about}: {error}", error.param) if isinstance(about, str) else error from error
        if written is None:
            raise _error(text, start, f"{name} needs {_NEEDED[name]}")
        return written, end

    def _written(self, name: str, value: object) -> str | None:
        """A directive in Lark of llguidance; None if its JSON has the wrong form."""
        match name, value:
            case "%json", _:
                return f"%json {json.dumps(self._translate_schema(self._schema(value)))} "
            case "%tagged", {"schema": schema, **tags}:
                return f"({self.arguments.tagged(self._schema(schema), Tags.read(tags))})"
            case "%quoted", {"schema": schema, "quote": str(quote), **others} if quote and not others:
                return f"({self.arguments.quoted(self._schema(schema), self._special.split(quote))})"
            case "%keywords", _:
                return f"({self.arguments.keywords(self._schema(value))})"
            case "%special", str(text) if len(text) <= MAX_LITERAL:
                return self._with_special_tokens(text)
            case "%tokens", {"only": [*texts], **others} if not others:
                return self._one_token(set(map(str, texts)))
            case "%tokens", {"except": [*texts], **others} if not others:
                return self._one_token(self._special.ids.keys() - set(map(str, texts)))
            case "%llguidance", {**options} if options.keys() <= _OPTIONS:
                return f"{name} {json.dumps(options)} "
            case "%regex", _:
                return f"{name} {json.dumps(value)} "
        return None

    def _with_special_tokens(self, text: str) -> str:
        """A text with its special tokens. Text between them is one terminal."""
        return written_parts(self._special.split(text))

    def _one_token(self, texts: Set[str]) -> str:
        """One of the special tokens with these texts. If the tokenizer has none, a control character stands for it."""
        found = [self._special.ids[text] for text in sorted(texts) if text in self._special.ids]
        self._special.used.update(found)
        return f"<[{','.join(map(str, found))}]>" if found else f"/{_NO_TOKEN}/"

    def _schema(self, value: object) -> Schema:
        return read_schema(json.dumps(value), _PARAM, self._params)


def check_total_nesting(num_levels: int) -> None:
    """Raises RequestError. num_levels: sum over all rules of 1 + the depth of parentheses."""
    if num_levels > MAX_TOTAL_NESTING:
        raise RequestError(
            f"grammar: rules and their parentheses have more than {MAX_TOTAL_NESTING:,} levels together", _PARAM
        )


def _check_bare(text: str) -> None:
    if (num_rules := text.count(":")) > MAX_RULES:
        raise RequestError(
            f"grammar must have at most {MAX_RULES} rules, not {num_rules:,}; write fewer, or make fewer tools strict",
            _PARAM,
        )
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
