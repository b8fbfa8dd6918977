"""What is asked, in the languages that llguidance reads."""

import json
import re

import llguidance

from quire.errors import RequestError
from quire.structured import StructuredOutputsParams
from quire.structured_outputs.ebnf import ebnf_to_lark, is_ebnf
from quire.structured_outputs.json_schema.reader import Schema, read_schema
from quire.structured_outputs.lark import checked_lark
from quire.structured_outputs.limits import checked_regex, options_of
from quire.structured_outputs.structural_tags import read_tags, tags_to_lark

# White space between the tokens of JSON is bounded, so that a model cannot go on with it for ever.
WHITESPACE = r"[ \n\r\t]{1,128}"
_SPACES = r" \n\r\t"
_WHITESPACE_PATTERN = re.compile(r"(?: |\\[nrts]|\\x20|[\[\]()|?*+\n\r\t]|\(\?:|\{\d{1,4}(?:,\d{0,4})?\})*")


def grammar_of(asked: StructuredOutputsParams) -> str:
    """A grammar for llguidance. Raises RequestError for what cannot be enforced as it is."""

    def write(schema: Schema) -> dict[str, object]:
        return with_options(schema, asked)

    match asked.kind:
        case "json":
            schema = read_schema(asked.text, "json", closed=asked.disable_additional_properties)
            if schema is False:
                raise RequestError("nothing fits the schema false", "json")
            return str(llguidance.LLMatcher.grammar_from_json_schema(write(schema)))
        case "regex":
            return str(llguidance.LLMatcher.grammar_from_regex(checked_regex(asked)))
        case "choice":
            return _lark(f"start: CHOICE\nCHOICE: {options_of(asked)}\n")
        case "grammar":
            return _lark(ebnf_to_lark(asked.text) if is_ebnf(asked.text) else checked_lark(asked.text, write))
        case "structural_tag":
            return _lark(tags_to_lark(read_tags(asked), write))


def with_options(schema: Schema, asked: StructuredOutputsParams) -> dict[str, object]:
    """A schema that `read_schema` made, with what is asked of white space, in llguidance's way."""
    options: dict[str, object] = {
        "whitespace_pattern": _whitespace(asked),
        "whitespace_flexible": not asked.disable_any_whitespace,
        # As json.dumps writes it, which is what models have read most; xgrammar means the same by it.
        "item_separator": ", " if asked.disable_any_whitespace else None,
        "key_separator": ": " if asked.disable_any_whitespace else None,
        # Without \u there is one way to write a name: "a" cannot come again as "\u0061".
        "json_allowed_escapes": 'nrbtf\\"',
    }
    named = {name: value for name, value in options.items() if value is not None}
    return {**(schema if isinstance(schema, dict) else {}), "x-guidance": named}


def _whitespace(asked: StructuredOutputsParams) -> str | None:
    if asked.disable_any_whitespace:
        return None
    pattern = asked.whitespace_pattern
    if pattern is None:
        return WHITESPACE
    if not _WHITESPACE_PATTERN.fullmatch(pattern):
        why = "may be made of ' ', \\n, \\r, \\t, \\s, [], (), |, ?, *, + and {m,n} only: JSON allows nothing else"
        raise RequestError(f"whitespace_pattern {why}", "whitespace_pattern")
    return _json_space(pattern)


def _json_space(pattern: str) -> str:
    r"""A pattern in which \s is the white space of JSON."""
    out = ""
    in_set = False
    for piece in re.findall(r"\\.|.", pattern, re.DOTALL):
        in_set = (in_set or piece == "[") and piece != "]"
        out += piece if piece != r"\s" else _SPACES if in_set else f"[{_SPACES}]"
    return out


def _lark(text: str) -> str:
    """A grammar in Lark, wrapped, so that it cannot be taken for anything else."""
    return json.dumps({"grammars": [{"lark_grammar": text}]})
