"""What a caller may ask of the form of an output: StructuredOutputsParams. Names as in vLLM, every value bounded."""

import json as jsonlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from quire.errors import RequestError, known_arguments_only

Kind = Literal["json", "regex", "choice", "grammar", "structural_tag"]

MAX_CHARACTERS = 131_072  # of a schema, pattern, grammar or tag, and of all choices
MAX_CHOICES = 4096
MAX_LITERAL = 4096  # characters of one choice, or of one text in a schema or a grammar
MAX_NESTING = 64  # of a schema or tag
MAX_WHITESPACE = 256  # characters of a whitespace pattern
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@known_arguments_only(RequestError)
@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form that an output has to have: one of json, regex, choice, grammar, json_object, structural_tag.

    json: a JSON schema, as text or as a mapping. regex: a pattern that the whole output matches. choice: one of these.
    grammar: Lark, or EBNF as llama.cpp and xgrammar write it. json_object: any JSON object. structural_tag: text in
    which what stands between tags has a form. whitespace_pattern: what may stand between the tokens of JSON;
    disable_any_whitespace: one space behind each comma and colon, as json.dumps writes it.
    disable_additional_properties: objects have no properties but those that their schema names. fast_forward: text that
    has to come is not generated token by token.
    Raises RequestError for a value out of bounds. Whether a schema or pattern makes sense is known when it is compiled.
    """

    json: str | Mapping[str, object] | bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, object] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    fast_forward: bool = True

    def __post_init__(self) -> None:
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        if self.json is not None:
            object.__setattr__(self, "json", _written("json", self.json))
        if self.structural_tag is not None:
            object.__setattr__(self, "structural_tag", _written("structural_tag", self.structural_tag))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            given_ones = " and ".join(given) or "none"
            raise RequestError(
                f"give one form (json, regex, choice, grammar, ...), not {given_ones}", "structured_outputs"
            )
        for name in ("disable_any_whitespace", "disable_additional_properties", "fast_forward", "json_object"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name == "json_object"):
                raise RequestError(f"{name} must be true or false", name)
        for name in ("regex", "grammar"):
            _check_text(name, getattr(self, name), MAX_CHARACTERS)
        _check_text("whitespace_pattern", self.whitespace_pattern, MAX_WHITESPACE)

    @property
    def kind(self) -> Kind:
        """What `text` is. A json_object is a schema."""
        if self.json_object:
            return "json"
        kinds: tuple[Kind, ...] = ("json", "regex", "choice", "grammar", "structural_tag")
        return next(name for name in kinds if getattr(self, name) is not None)

    @property
    def text(self) -> str:
        """The schema, pattern, grammar or tag; choices as a JSON list."""
        if self.json_object:
            return '{"type": "object"}'
        if self.choice is not None:
            return jsonlib.dumps(self.choice)
        text = getattr(self, self.kind)
        assert isinstance(text, str), "written down when it was made"
        return text


def _written(name: str, value: object) -> str:
    """A schema or a tag as JSON text, which is valid JSON, not too long and not nested too deeply."""
    if isinstance(value, str):
        _check_text(name, value, MAX_CHARACTERS)
        try:
            parsed = jsonlib.loads(value)
            _check_depth(name, parsed)
            check_unicode(name, jsonlib.dumps(parsed, ensure_ascii=False))
        except (ValueError, RecursionError) as error:
            if isinstance(error, RequestError):
                raise
            raise RequestError(f"{name} is not valid JSON: {error}", name) from error
        return value
    _check_depth(name, value)
    try:
        text = jsonlib.dumps(value, allow_nan=False)
        check_unicode(name, jsonlib.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"{name} cannot be written as JSON: {error}", name) from error
    _check_text(name, text, MAX_CHARACTERS)
    return text


def _check_depth(name: str, value: object) -> None:
    """Looks at no more values than could be written within the bounds: each takes two characters."""
    level, most = [value], MAX_CHARACTERS // 2
    for _ in range(MAX_NESTING + 1):
        containers = [one for one in level if isinstance(one, (dict, list, tuple))]
        most -= sum(map(len, containers))
        if most < 0:
            raise RequestError(f"{name} must have 1 to {MAX_CHARACTERS:,} characters, and has more", name)
        level = [one for outer in containers for one in (outer.values() if isinstance(outer, dict) else outer)]
        if not level:
            return
    raise RequestError(f"{name} is nested more than {MAX_NESTING} levels deep", name)


def _choices(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise RequestError("choice must be a list of strings", "choice")
    if not 0 < len(value) <= MAX_CHOICES or not all(value):
        raise RequestError(f"choice must have 1 to {MAX_CHOICES} strings, none of them empty", "choice")
    for one in value:
        if len(one) > MAX_LITERAL:
            raise RequestError(f"one choice must have at most {MAX_LITERAL:,} characters, not {len(one):,}", "choice")
        check_unicode("choice", one)
    if sum(map(len, value)) > MAX_CHARACTERS:
        raise RequestError(f"choice must have at most {MAX_CHARACTERS:,} characters together", "choice")
    return tuple(dict.fromkeys(value))


def _check_text(name: str, text: object, most: int) -> None:
    if text is None:
        return
    if not isinstance(text, str):
        raise RequestError(f"{name} must be text, not {type(text).__name__}", name)
    if not 0 < len(text) <= most:
        raise RequestError(f"{name} must have 1 to {most:,} characters, not {len(text):,}", name)
    check_unicode(name, text)


def check_unicode(name: str, text: str) -> None:
    """Raises RequestError for a text that cannot be written down. JSON can name half of a character by its escape."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is not valid Unicode: an unpaired surrogate at {error.start}", name) from error
