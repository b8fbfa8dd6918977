"""Structural tags as Lark grammars: free text with constrained parts, in vLLM's older form and in xgrammar's `format`.

Free text ends at a text that must follow it: a trigger, the end of a tag, or a constant. A lazy terminal matches the
free text together with the first such text. A regex or an EBNF grammar is one grammar with the text that must follow
it, so that it does not take that text for its own. Texts of special tokens in a tag are these tokens.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from quire.errors import RequestError, nearest
from quire.params import MAX_LITERAL, StructuredOutputsParams
from quire.structured_outputs.ebnf import ebnf_rules, is_ebnf
from quire.structured_outputs.json_schema.logic import Part, Schema
from quire.structured_outputs.json_schema.reader import read_schema
from quire.structured_outputs.lark import MAX_GRAMMAR
from quire.structured_outputs.limits import MAX_REGEX
from quire.structured_outputs.vocabulary import SpecialTokens

_PARAM = "structural_tag"
_MAX_TAGS = 256  # of one list
_MAX_FORMATS = 1024
_MAX_TEXT = 1024  # characters of a trigger, begin or end
_MAX_WRITTEN = 2**21  # characters of expressions; each option of an `or` has all ends that may follow
_FREE_TEXT = "/(?s:.)*/"
_SPACE = r"/[ \t\n]{1,8}/"  # around the parameters of Qwen's XML


class After(NamedTuple):
    """What follows a format: one of the texts `ends`. If there are none, `is_last` tells that the output ends."""

    ends: tuple[str, ...] = ()
    is_last: bool = False


def tags_to_lark(
    params: StructuredOutputsParams, translate_schema: Callable[[Schema], object], special: SpecialTokens
) -> str:
    """The structural tag as a Lark grammar. Raises RequestError that names the invalid part.

    translate_schema: returns a schema in the format of llguidance. special: the tokens that texts of the tag may have.
    """
    value = json.loads(params.text)
    if not isinstance(value, dict) or value.get("type", _PARAM) != _PARAM:
        raise RequestError(
            'structural_tag is {"type": "structural_tag", "format": {...}}, or has structures and triggers', _PARAM
        )
    writer = _Writer(params, translate_schema, special)
    if "format" in value:
        _check_fields(value, "", ("type", "format"))
        start = writer.write(value["format"], "format", After(is_last=True))
    else:
        _check_fields(value, "", ("type", "structures", "triggers"))
        places = {"triggers": "triggers", "tags": "structures"}
        start = writer.write_triggered(_of_structures(value), places, After(is_last=True))
    return "\n".join([f"start: {start}", *writer.lines]) + "\n"


def _of_structures(value: Mapping[str, object]) -> dict[str, object]:
    """The older form as a format."""
    structures = _list(value.get("structures"), "structures")
    for index, one in enumerate(structures):
        if not isinstance(one, dict) or one.keys() - {"begin", "schema", "end"} or "begin" not in one:
            raise _error(f"structures/{index} is an object with begin, schema and end")
    tags = [
        {
            "begin": one["begin"],
            "content": {"type": "json_schema", "json_schema": one.get("schema", True)},
            "end": one.get("end", ""),
        }
        for one in structures
    ]
    return {"type": "triggered_tags", "triggers": value.get("triggers"), "tags": tags}


class _Writer:
    """Writes formats as expressions of Lark. lines: the rules to which these refer."""

    def __init__(
        self, params: StructuredOutputsParams, translate_schema: Callable[[Schema], object], special: SpecialTokens
    ) -> None:
        self.lines: list[str] = []
        self._params = params
        self._translate_schema = translate_schema
        self._special = special
        self._num_formats = 0
        self._num_characters = 0  # of all expressions
        self._terminals: dict[str, str] = {}

    def write(self, value: object, at: str, after: After) -> str:
        """A format together with what follows it. at: its place in the structural tag."""
        self._num_formats += 1
        if self._num_formats > _MAX_FORMATS:
            raise _error(f"more than {_MAX_FORMATS:,} formats")
        if not isinstance(value, dict):
            raise _error(f"{at} is an object with a type")
        kind = value.get("type")
        if not isinstance(kind, str) or kind not in _FORMATS:
            raise _error(f"{at}/type: unknown type {kind!r:.100}{nearest(str(kind)[:100], _FORMATS)}")
        write, fields = _FORMATS[kind]
        _check_fields(value, at, ("type", *fields))
        written = write(self, value, at, after)
        self._num_characters += len(written)
        if self._num_characters > _MAX_WRITTEN:
            raise _error(
                f"the formats are more than {_MAX_WRITTEN:,} characters of grammar; give fewer ends or options"
            )
        return written

    def write_triggered(self, value: Mapping[str, object], at: Mapping[str, str], after: After) -> str:
        """Free text in which tags begin at triggers. at: the places of its fields `triggers` and `tags`."""
        triggers = _texts(value.get("triggers"), at["triggers"])
        for end in after.ends:
            if any(trigger in end or end in trigger for trigger in triggers):
                raise _error(f"{at['triggers']}: a trigger and {end!r:.100}, which ends the text, must not overlap")
        tags = _list(value.get("tags"), at["tags"])
        after_trigger: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        whole = []
        for index, tag in enumerate(tags):
            place = f"{at['tags']}/{index}"
            begin = _tag(tag, place, least=1)["begin"]
            trigger = next((one for one in triggers if begin.startswith(one)), None)
            if trigger is None:
                raise _error(f"{place}/begin must start with one of the triggers")
            rest = self._rule(self._tag_behind_begin(tag, place, After()))
            whole.append(f"{self._literal(begin)} {rest}")
            after_trigger[trigger].append(f"{self._literal(begin.removeprefix(trigger))} {rest}")
        terminal = self._text(value.get("excludes"), at["triggers"])
        starts = [
            f"{self._until(terminal, trigger, at['triggers'])} ({' | '.join(options)})"
            for trigger, options in after_trigger.items()
            if options
        ]
        one = self._rule(" | ".join(starts))
        first = f"({' | '.join(whole)})"
        match _flag(value, "at_least_one"), _flag(value, "stop_after_first"):
            case True, True:
                return f"{first} {self._ends(after)}"
            case True, False:
                return f"{first} {one}* {self._free_text(terminal, at['triggers'], after)}"
            case False, True:
                return f"({one} {self._ends(after)} | {self._free_text(terminal, at['triggers'], after)})"
        return f"{one}* {self._free_text(terminal, at['triggers'], after)}"

    def const_string(self, value: Mapping[str, object], at: str, after: After) -> str:
        """A constant."""
        text = _text(value.get("value"), f"{at}/value", least=0, most=MAX_LITERAL)
        return f"{self._literal(text)} {self._ends(after)}"

    def json_schema(self, value: Mapping[str, object], at: str, after: After) -> str:
        """JSON of a schema."""
        match value.get("style", "json"):
            case "json":
                return f"{self._json(self._schema(value, at))} {self._ends(after)}"
            case "qwen_xml":
                return self.qwen_xml_parameter(value, at, after)
        raise _error(f"{at}/style is 'json' or 'qwen_xml'")

    def qwen_xml_parameter(self, value: Mapping[str, object], at: str, after: After) -> str:
        """The properties of an object as `<parameter=NAME>VALUE</parameter>`; strings are not in quotes."""
        schema = self._schema(value, at)
        if not isinstance(schema, Part) or schema.get("type", "object") != "object" or schema.keys() - _OBJECT_KEYWORDS:
            raise _error(f"{at}/json_schema: parameters need an object with properties, without further conditions")
        definitions = schema.get("$defs", {})
        parts = [f"{self._space()}?"]
        for name, inner in schema.get("properties", {}).items():
            if inner is False:
                continue
            body = self._parameter(_resolved(inner, definitions), definitions, f"{at}/json_schema")
            one = f"{self._literal(f'<parameter={name}>')} {body} {self._space()}?"
            parts.append(one if name in schema.get("required", ()) else f"({one})?")
        return f"{' '.join(parts)} {self._ends(after)}"

    def grammar(self, value: Mapping[str, object], at: str, after: After) -> str:
        """A text of an EBNF grammar."""
        text = _text(value.get("grammar"), f"{at}/grammar", most=MAX_GRAMMAR)
        if not is_ebnf(text):
            raise _error(f"{at}/grammar is EBNF (root ::= ...)")
        plain, ends = self._plain_ends(after)
        try:
            start, lines = ebnf_rules(text, then=plain, suffix=f"_{len(self.lines)}")
        except RequestError as error:
            raise _error(f"{at}: {error}") from error
        self.lines += lines
        return f"{start} {ends}"

    def regex(self, value: Mapping[str, object], at: str, after: After) -> str:
        """A text of a pattern."""
        pattern = _text(value.get("pattern"), f"{at}/pattern", most=MAX_REGEX)
        plain, ends = self._plain_ends(after)
        return f"{self._terminal(f'{_slashed(pattern)} {_either(map(_quoted, plain))}')} {ends}"

    def any_text(self, value: Mapping[str, object], at: str, after: After) -> str:
        """Free text."""
        excluded = value.get("excludes", value.get("excluded_str"))
        return self._free_text(self._text(excluded, at), at, after)

    def sequence(self, value: Mapping[str, object], at: str, after: After) -> str:
        """Several formats, one after another."""
        elements = _list(value.get("elements"), f"{at}/elements")
        leads = [*map(_lead, elements[1:]), ""]  # the text with which the next one begins is written by the one before
        parts = []
        for index, (element, lead) in enumerate(zip(elements, leads, strict=True)):
            is_written = index > 0 and bool(leads[index - 1])
            behind = after if index == len(elements) - 1 else After((lead,) if lead else ())
            parts.append(
                self.write(_without_lead(element) if is_written else element, f"{at}/elements/{index}", behind)
            )
        return " ".join(parts)

    def either(self, value: Mapping[str, object], at: str, after: After) -> str:
        """One of several formats."""
        elements = _list(value.get("elements"), f"{at}/elements")
        options = [self.write(one, f"{at}/elements/{index}", after) for index, one in enumerate(elements)]
        return _either(options)

    def tag(self, value: Mapping[str, object], at: str, after: After) -> str:
        """A begin, a format and an end."""
        begin = _tag(value, at, least=0)["begin"]
        return f"{self._literal(begin)} {self._tag_behind_begin(value, at, after)}"

    def triggered_tags(self, value: Mapping[str, object], at: str, after: After) -> str:
        """See `write_triggered`."""
        return self.write_triggered(value, {"triggers": f"{at}/triggers", "tags": f"{at}/tags"}, after)

    def tags_with_separator(self, value: Mapping[str, object], at: str, after: After) -> str:
        """Tags with a text between two of them."""
        separator = _text(value.get("separator", ""), f"{at}/separator", least=0)
        tags = _list(value.get("tags"), f"{at}/tags")
        options = [
            self.tag(_tag(one, f"{at}/tags/{i}", least=0), f"{at}/tags/{i}", After()) for i, one in enumerate(tags)
        ]
        one = self._rule(_either(options))
        several = one if _flag(value, "stop_after_first") else f"{one} ({self._literal(separator)} {one})*"
        return f"({several}){'' if _flag(value, 'at_least_one') else '?'} {self._ends(after)}"

    def _tag_behind_begin(self, tag: Mapping[str, object], at: str, after: After) -> str:
        given = tag.get("end", "")
        ends = _texts(given, f"{at}/end") if isinstance(given, list) else (_text(given, f"{at}/end", least=0),)
        if ends == ("",):
            return self.write(tag.get("content"), f"{at}/content", after)
        return f"{self.write(tag.get('content'), f'{at}/content', After(ends))} {self._ends(after)}"

    def _free_text(self, terminal: str, at: str, after: After) -> str:
        """Free text up to the first of the texts that may follow it."""
        if not after.ends and not after.is_last:
            raise _error(f"{at}: behind free text comes a constant, a tag, the end of a tag or of the output")
        return _either(self._until(terminal, end, at) for end in after.ends) if after.ends else terminal

    def _until(self, terminal: str, end: str, at: str) -> str:
        """Free text up to the first `end`, and this end."""
        first, *rest = self._special.split(end)
        if isinstance(first, int):
            return f"{terminal} {self._literal(end)}"
        if rest:
            raise _error(f"{at}: a special token may stand behind free text at the begin of {end!r:.100} only")
        return self._rule(f"{terminal} {_quoted(end)}", "[lazy]")

    def _text(self, excluded: object, at: str) -> str:
        """The terminal of free text without the texts `excluded`."""
        everything = self._terminal(_FREE_TEXT)
        if excluded is None or excluded == []:
            return everything
        return self._terminal(
            f"{everything} & ~({everything} {_either(map(_quoted, _texts(excluded, at)))} {everything})"
        )

    def _parameter(self, schema: Schema, definitions: Mapping[str, Schema], at: str) -> str:
        """A value of Qwen's XML with its end."""
        end = "</parameter>"
        if schema is True or (isinstance(schema, Part) and schema.get("type", "string") == "string"):
            keywords = schema if isinstance(schema, Part) else {}
            values = keywords.get("enum", [keywords["const"]] if "const" in keywords else None)
            if values is not None and all(isinstance(one, str) for one in values):
                return f"{self._space()}? {_either(map(_quoted, values))} {self._space()}? {_quoted(end)}"
            if not keywords.keys() - {"type"}:
                return self._until(self._text(None, at), end, at)
            if not keywords.keys() - {"type", "minLength", "maxLength"}:
                length = f"{{{keywords.get('minLength', 0)},{keywords.get('maxLength', '')}}}"
                value = self._terminal(f"/\\n?(?s:.){length}\\n?/ & {self._text([end], at)}")
                return self._terminal(f"{value} {_quoted(end)}")
            if "type" in keywords:
                raise _error(f"{at}: {min(keywords.keys() - {'type'})} of a text without quotes is not enforced")
        if isinstance(schema, Part) and definitions:
            schema = Part(schema.at, {**schema, "$defs": definitions})
        return f"{self._space()}? {self._json(schema)} {self._space()}? {_quoted(end)}"

    def _schema(self, value: Mapping[str, object], at: str) -> Schema:
        schema = value.get("json_schema", True)
        return read_schema(schema if isinstance(schema, str) else json.dumps(schema), _PARAM, self._params)

    def _json(self, schema: Schema) -> str:
        return f"%json {json.dumps(self._translate_schema(schema))}"

    def _space(self) -> str:
        return self._terminal(_SPACE)

    def _ends(self, after: After) -> str:
        return _either(map(self._literal, after.ends))

    def _plain_ends(self, after: After) -> tuple[tuple[str, ...], str]:
        """The texts that may follow, if none has special tokens; otherwise the same as an expression."""
        if all(isinstance(part, str) for end in after.ends for part in self._special.split(end)):
            return after.ends, ""
        return (), self._ends(after)

    def _literal(self, text: str) -> str:
        return " ".join(_quoted(part) if isinstance(part, str) else f"<[{part}]>" for part in self._special.split(text))

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        """The name of a terminal. Equal ones have one name."""
        if body not in self._terminals:
            self._terminals[body] = f"T{len(self._terminals)}"
            self.lines.append(f"{self._terminals[body]}: {body}")
        return self._terminals[body]


_Write = Callable[[_Writer, Mapping[str, object], str, After], str]
_FORMATS: Mapping[str, tuple[_Write, tuple[str, ...]]] = MappingProxyType(  # type -> how it is written, and its fields
    {
        "const_string": (_Writer.const_string, ("value",)),
        "json_schema": (_Writer.json_schema, ("json_schema", "style")),
        "qwen_xml_parameter": (_Writer.qwen_xml_parameter, ("json_schema",)),
        "grammar": (_Writer.grammar, ("grammar",)),
        "regex": (_Writer.regex, ("pattern",)),
        "any_text": (_Writer.any_text, ("excludes", "excluded_str")),
        "sequence": (_Writer.sequence, ("elements",)),
        "or": (_Writer.either, ("elements",)),
        "tag": (_Writer.tag, ("begin", "content", "end")),
        "triggered_tags": (
            _Writer.triggered_tags,
            ("triggers", "tags", "excludes", "at_least_one", "stop_after_first"),
        ),
        "tags_with_separator": (
            _Writer.tags_with_separator,
            ("tags", "separator", "at_least_one", "stop_after_first"),
        ),
    }
)
_OBJECT_KEYWORDS = frozenset({"type", "properties", "required", "additionalProperties", "$defs"})


def _lead(element: object) -> str:
    """The text with which a format begins, as far as it is a constant."""
    if not isinstance(element, dict):
        return ""
    text = element.get({"const_string": "value", "tag": "begin"}.get(str(element.get("type")), ""))
    return text if isinstance(text, str) else ""


def _without_lead(element: Mapping[str, object]) -> dict[str, object]:
    return {**element, ("value" if element["type"] == "const_string" else "begin"): ""}


def _resolved(schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
    """The target of a reference that has no keywords beside it."""
    for _ in range(len(definitions)):
        if not isinstance(schema, Part) or schema.keys() != {"$ref"}:
            break
        schema = definitions[str(schema["$ref"]).removeprefix("#/$defs/")]
    return schema


def _tag(value: object, at: str, *, least: int) -> dict[str, Any]:
    """A tag whose begin has at least `least` characters."""
    if not isinstance(value, dict) or value.get("type", "tag") != "tag" or "content" not in value:
        raise _error(f"{at} is an object with begin, content and end")
    _check_fields(value, at, ("type", "begin", "content", "end"))
    _text(value.get("begin", "" if not least else None), f"{at}/begin", least=least)
    return value


def _flag(value: Mapping[str, object], name: str) -> bool:
    flag = value.get(name, False)
    if not isinstance(flag, bool):
        raise _error(f"{name} is true or false")
    return flag


def _list(value: object, at: str) -> list[Any]:
    if not isinstance(value, list) or not 0 < len(value) <= _MAX_TAGS:
        raise _error(f"{at} is a list of 1 to {_MAX_TAGS} objects")
    return value


def _texts(value: object, at: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not 0 < len(value) <= _MAX_TAGS:
        raise _error(f"{at} is a list of 1 to {_MAX_TAGS} strings")
    return tuple(dict.fromkeys(_text(one, f"{at}/{index}") for index, one in enumerate(value)))


def _text(value: object, at: str, *, least: int = 1, most: int = _MAX_TEXT) -> str:
    if not isinstance(value, str) or not least <= len(value) <= most:
        raise _error(f"{at} is a string of {least} to {most:,} characters")
    return value


def _check_fields(value: Mapping[str, object], at: str, known: Sequence[str]) -> None:
    for name in value:
        if name not in known:
            raise _error(f"{f'{at}: ' * bool(at)}unknown field {name!r:.100}{nearest(str(name)[:100], known)}")


def _error(why: str) -> RequestError:
    return RequestError(f"structural_tag: {why}", _PARAM)


def _either(options: Iterable[str]) -> str:
    """One of several expressions; "" without any."""
    written = list(options)
    return written[0] if len(written) == 1 else f"({' | '.join(written)})" if written else ""


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _slashed(pattern: str) -> str:
    """A pattern between slashes."""
    escaped = re.sub(
        r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), pattern, flags=re.DOTALL
    )
    return f"/{escaped}/"
