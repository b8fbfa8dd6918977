"""Translated schemas in llguidance's form: patterns in the syntax of Rust, formats as patterns, no `not`."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from llguidance import LLMatcher

from quire.errors import RequestError
from quire.structured_outputs.json_schema.bounds import schema_error
from quire.structured_outputs.json_schema.logic import FRACTION, TYPES, Part, Schema, type_of
from quire.structured_outputs.json_schema.values import FORMATS, escaped

_MAX_EXCLUDED = 1024  # characters of the texts that one `not` excludes
_MAX_LONGEST = 64  # characters of one of them: groups of the pattern are nested as deep


def guidance_schema(schema: Schema, param: str) -> bool | dict[str, object]:
    """The schema in llguidance's form. Raises RequestError for a pattern or `not` that cannot be enforced."""
    if isinstance(schema, bool):
        return schema
    out: dict[str, Any] = {}
    more: list[object] = []
    for key, argument in schema.items():
        match key, argument:
            case "pattern", str():
                out[key] = _pattern(argument, f"{schema.at}/pattern", param)
            case "type", _ if FRACTION in argument:
                raise schema_error(schema.at, "numbers that are no integers cannot be told from integers", param)
            case "format", str():
                more.append({"pattern": FORMATS[argument]})
            case "not", {"enum": [*values]}:
                more.append({"anyOf": list(_others(schema, values, param))})
            case (("properties" | "patternProperties" | "$defs"), {}):
                is_pattern = key == "patternProperties"
                out[key] = {
                    _pattern(name, f"{schema.at}/{key}/{escaped(name)}", param)
                    if is_pattern
                    else name: guidance_schema(one, param)
                    for name, one in argument.items()
                }
            case (("allOf" | "anyOf" | "prefixItems"), [*parts]):
                out[key] = [guidance_schema(one, param) for one in parts]
            case (("items" | "additionalProperties"), (bool() | Part())):
                out[key] = guidance_schema(argument, param)
            case _:
                out[key] = argument
    if more:
        out["allOf"] = [*out.get("allOf", []), *more]
    return out


def is_empty(schema: Part) -> bool:
    """Whether llguidance finds that no value satisfies a schema."""
    try:
        grammar = LLMatcher.grammar_from_json_schema(guidance_schema(schema, ""))  # type: ignore[arg-type]
    except RequestError:  # a part that it cannot enforce
        return False
    return "nsatisfiable" in LLMatcher.validate_grammar(grammar)


def _pattern(pattern: str, at: str, param: str) -> str:
    try:
        return strict_pattern(pattern)
    except ValueError as error:
        raise schema_error(at, f"pattern: {error}", param) from error


def _others(schema: Part, values: Sequence[object], param: str) -> Iterator[dict[str, object]]:
    """Alternatives of all values but these."""
    by_type: dict[str, list[object]] = {}
    for value in values:
        by_type.setdefault(type_of(value).replace("integer", "number"), []).append(value)
    types = schema.get("type", TYPES)
    names = {types} if isinstance(types, str) else set(types)
    for name in TYPES:
        excluded = by_type.get(name, [])
        if name not in names and not (name == "number" and "integer" in names):
            continue
        if excluded:
            yield from _others_of_type(name, excluded, schema.at, param)
        else:
            yield {"type": name}


def _others_of_type(kind: str, values: Sequence[object], at: str, param: str) -> Iterator[dict[str, object]]:
    """Alternatives of all values of one type but these."""
    match kind:
        case "boolean":
            for one in (False, True):
                if one not in values:
                    yield {"const": one}
        case "string":
            texts = [one for one in values if isinstance(one, str)]
            if sum(map(len, texts)) > _MAX_EXCLUDED or max(map(len, texts)) > _MAX_LONGEST:
                why = f"texts of at most {_MAX_LONGEST} characters, {_MAX_EXCLUDED:,} together, can be excluded"
                raise schema_error(at, why, param)
            yield {"type": "string", "pattern": f"^(?:{_other_text(texts)})$"}
        case "number":
            numbers = sorted({one for one in values if isinstance(one, int | float)})
            for low, high in zip([None, *numbers], [*numbers, None], strict=True):
                bounds = {"exclusiveMinimum": low, "exclusiveMaximum": high}
                yield {"type": "number", **{key: bound for key, bound in bounds.items() if bound is not None}}
        case "array" if values == [[]]:
            yield {"type": "array", "minItems": 1}
        case "object" if values == [{}]:
            yield {"type": "object", "minProperties": 1}
        case "array" | "object":
            raise schema_error(at, f"'not' of an {kind} is not enforced; use anyOf of the allowed cases", param)


def _other_text(words: Iterable[str]) -> str:
    """A pattern of all texts but these words."""
    behind: dict[str, list[str]] = {}
    for word in words:
        behind.setdefault(word[:1], []).append(word[1:])
    is_word = bool(behind.pop("", None))
    if not behind:
        return r"[^\x01]+" if is_word else r"[^\x01]*"
    first = "".join(f"\\x{{{ord(one):x}}}" for one in behind)
    options = [rf"[[^{first}]&&[^\x01]][^\x01]*"]
    options += [f"\\x{{{ord(one):x}}}(?:{_other_text(rest)})" for one, rest in behind.items()]
    return "|".join(options if is_word else [*options, ""])


# By letter of the class: characters that both JavaScript (ECMA-262, 12.2, 12.3, 22.2.2.9) and Python count, or either.
_CLASS_INTERSECTION = {
    "s": r"\t\n\x0b\x0c\r\x20\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000",
    "d": "0-9",
    "w": "0-9A-Za-z_",
}
_CLASS_UNION = {"s": _CLASS_INTERSECTION["s"] + r"\x1c-\x1f\u0085\ufeff", "d": r"\p{Nd}", "w": r"\p{L}\p{N}\p{M}\p{Pc}"}
_PATTERN_CONTROL = re.compile(r"[\x00-\x08\x0b\x0e-\x1f]|\\(?:x(?:[01]|\{)|u(?:00[01]|\{)|U000000[01]|c|[0aebv])")
_PIECE = re.compile(
    r"(?P<set>\[\^?(?:[^\]\\]|\\.)*\])|(?P<property>\\[pP](?:\{[^{}]*\}|.))|(?P<escape>\\.)|(?P<any>\.)|(?P<other>.)",
    re.DOTALL,
)
_WHOLE_SETS = {"[]", "[^]"}  # no character and any character, in JavaScript only


def strict_pattern(pattern: str) -> str:
    """The pattern, narrowed to what both JavaScript and Python match. Raises ValueError if a part is unsupported."""
    if re.search(r"\\b", pattern):
        raise ValueError("\\b is not supported")
    if _PATTERN_CONTROL.search(pattern):
        raise ValueError("control characters other than \\t, \\n, \\r and \\f cannot be named")
    return "".join(map(_rewritten, _PIECE.finditer(pattern)))


def _rewritten(piece: re.Match[str]) -> str:
    written = piece[0]
    match piece.lastgroup:
        case "set":
            if written in _WHOLE_SETS or "--" in written:
                raise ValueError(f"the set {written!r:.50} is not supported")
            return _without_control(_set(written))
        case "property":
            return _without_control(written)
        case "any":
            return _without_control(r"[^\n\r\u2028\u2029]")
        case "escape":
            return _class(written)
    return written


def _set(written: str) -> str:
    """The set with "[", "&" and "~" escaped: in JavaScript they are plain characters in a set."""
    opening = "[^" if written.startswith("[^") else "["
    inner = re.findall(r"\\.|.", written[len(opening) : -1], re.DOTALL)
    is_negated = opening == "[^"
    return opening + "".join(f"\\{one}" if one in "[&~" else _class(one, is_negated=is_negated) for one in inner) + "]"


def _class(escape: str, *, is_negated: bool = False) -> str:
    """The set of a class escape such as \\d; another escape unchanged. is_negated: it stands in a negated set."""
    letter = escape[1:]
    if letter in _CLASS_INTERSECTION:
        return f"[{(_CLASS_UNION if is_negated else _CLASS_INTERSECTION)[letter]}]"
    if letter.lower() in _CLASS_INTERSECTION and len(escape) == 2:
        return f"[^{(_CLASS_INTERSECTION if is_negated else _CLASS_UNION)[letter.lower()]}]"
    return escape


def _without_control(one: str) -> str:
    return rf"[{one}&&[^\x01]]"
