"""Grammars in Lark, in llguidance's dialect.

`stop`, which removes generated text, and unknown directives are refused, because with them an output could be no text
of the grammar. Schemas within a grammar are read strictly. Directives of quire's own write special tokens and the
arguments of tool calls.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from quire.errors import RequestError
from quire.params import MAX_LITERAL, StructuredOutputsParams
from quire.structured_outputs.call_arguments import ArgumentGrammars, Tags
from quire.structured_outputs.json_schema.logic import Schema
from quire.structured_outputs.json_schema.reader import read_schema

MAX_GRAMMAR = 32_768  # characters
MAX_RULES = 512
MAX_TOTAL_NESTING = 1024  # levels of parentheses, summed over all rules; llguidance recurses through them
_PARAM = "grammar"

_WITH_SCHEMAS = frozenset({"%json", "%tagged", "%keywords"})
_MAX_SPACE = 256  # characters before the JSON of a directive
_OPTIONS = frozenset({"no_forcing", "allow_initial_skip", "ignore_once"})
_NEEDED: Mapping[str, str] = MappingProxyType(  # directive -> its JSON
    {
        "%json": "a schema",
        "%tagged": "an object with a schema",
        "%keywords": "a schema",
        "%special": f"a text of at most {MAX_LITERAL:,} characters",
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
    special_ids: Mapping[str, int],
) -> str:
    """The same grammar without comments, and with quire's directives replaced.

    translate_schema: returns a checked schema in the format of llguidance. special_id: returns the id of the special
    token with a text, if there is one. RequestError. Other errors are found when the grammar is compiled.
    """
    text = params.text
    directives = _Directives(params, translate_schema, special_ids)
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
        raise RequestError(f"grammar must have at most {MAX_GRAMMAR:,} characters", _PARAM)


class _Directives:
    """Replaces directives with JSON by Lark of llguidance. See `checked_lark` for the arguments."""

    def __init__(
        self,
        params: StructuredOutputsParams,
        translate_schema: Callable[[Schema], object],
        special_ids: Mapping[str, int],
    ) -> None:
        self.arguments = ArgumentGrammars(translate_schema)
        self._params = params
        self._translate_schema = translate_schema
        self._special_ids = special_ids
        longest_first = sorted(special_ids, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

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
            schema = value.get("schema") if name == "%tagged" else value
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
            case "%keywords", _:
                return f"({self.arguments.keywords(self._schema(value))})"
            case "%special", str(text) if len(text) <= MAX_LITERAL:
                return self._with_special_tokens(text)
            case "%llguidance", {**options} if options.keys() <= _OPTIONS:
                return f"{name} {json.dumps(options)} "
            case "%regex", _:
                return f"{name} {json.dumps(value)} "
        return None

    def _with_special_tokens(self, text: str) -> str:
        """A text with its special tokens. Text between them is one terminal."""
        pieces = enumerate(self._special.split(text))
        parts = [f"<[{self._special_ids[one]}]>" if place % 2 else _quoted(one) for place, one in pieces if one]
        return " ".join(parts) or '""'

    def _schema(self, value: object) -> Schema:
        return read_schema(json.dumps(value), _PARAM, self._params)


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


_TAG_PARAM = "structural_tag"
_MAX_TAGS = 256
_MAX_TEXT = 1024  # characters of a trigger, begin or end


@dataclass(frozen=True, slots=True)
class Tag:
    """One structure. trigger: the prefix of `begin` that starts it."""

    trigger: str
    begin: str
    schema: Schema
    end: str


def read_tags(params: StructuredOutputsParams) -> list[Tag]:
    """The structures of a structural tag. Raises RequestError that names the invalid one."""
    value = json.loads(params.text)
    if not isinstance(value, dict) or value.get("type", "structural_tag") != "structural_tag":
        raise RequestError(
            'structural_tag is {"type": "structural_tag", "structures": [...], "triggers": [...]}', _TAG_PARAM
        )
    if "format" in value:
        raise RequestError("structural_tag: format is not supported; use structures and triggers", _TAG_PARAM)
    unknown = value.keys() - {"type", "structures", "triggers"}
    if unknown:
        raise RequestError(f"structural_tag: unknown field {min(unknown)!r:.100}", _TAG_PARAM)
    triggers = value.get("triggers")
    if not isinstance(triggers, list) or not triggers or len(triggers) > _MAX_TAGS:
        raise RequestError(f"structural_tag: triggers is a list of 1 to {_MAX_TAGS} strings", _TAG_PARAM)
    for index, trigger in enumerate(triggers):
        _check_text(trigger, f"triggers/{index}", at_least=1)
    structures = value.get("structures")
    if not isinstance(structures, list) or not structures or len(structures) > _MAX_TAGS:
        raise RequestError(f"structural_tag: structures is a list of 1 to {_MAX_TAGS} objects", _TAG_PARAM)
    return [_tag(one, f"structures/{i}", triggers, params) for i, one in enumerate(structures)]


def tags_to_lark(tags: list[Tag], translate_schema: Callable[[Schema], object]) -> str:
    """A Lark grammar of free text and tags. translate_schema: returns a schema in the format of llguidance."""
    triggers = list(dict.fromkeys(tag.trigger for tag in tags))
    lines = [
        f"start: ({' | '.join(f'after{i}' for i in range(len(triggers)))})* rest",
        "rest: TEXT",
        "TEXT: /(?s:.)*/",
    ]
    for index, trigger in enumerate(triggers):
        options = " | ".join(f"tag{i}" for i, tag in enumerate(tags) if tag.trigger == trigger)
        # [lazy]: the free text ends at the first trigger.
        lines += [f"head{index}[lazy]: TEXT {_quoted(trigger)}", f"after{index}: head{index} ({options})"]
    for index, tag in enumerate(tags):
        begin = _quoted(tag.begin.removeprefix(tag.trigger))
        lines.append(f"tag{index}: {begin} %json {json.dumps(translate_schema(tag.schema))} {_quoted(tag.end)}")
    return "\n".join(lines) + "\n"


def _tag(value: object, at: str, triggers: list[str], params: StructuredOutputsParams) -> Tag:
    if not isinstance(value, dict) or value.keys() - {"begin", "schema", "end"} or "begin" not in value:
        raise RequestError(f"structural_tag: {at} is an object with begin, schema and end", _TAG_PARAM)
    begin, end = value["begin"], value.get("end", "")
    _check_text(begin, f"{at}/begin", at_least=1)
    _check_text(end, f"{at}/end", at_least=0)
    trigger = next((one for one in triggers if begin.startswith(one)), None)
    if trigger is None:
        raise RequestError(f"structural_tag: {at}/begin must start with one of the triggers", _TAG_PARAM)
    schema = read_schema(json.dumps(value.get("schema", True)), _TAG_PARAM, params)
    return Tag(trigger, begin, schema, end)


def _check_text(value: object, at: str, *, at_least: int) -> None:
    if not isinstance(value, str) or not at_least <= len(value) <= _MAX_TEXT:
        raise RequestError(f"structural_tag: {at} is a string of {at_least} to {_MAX_TEXT} characters", _TAG_PARAM)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else '""'
