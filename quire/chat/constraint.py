"""The constraint under which a model can only write valid tool calls, in its own format.

It is a grammar in Lark (docs/structured.md). Schemas are those of the tools, without annotations. Objects that name
properties have no others, if the schema does not say more about them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from quire.chat.formats import SPECIAL_TOKEN, CallForm, JsonCall, ToolFormat
from quire.chat.strict_calls import arguments_directive, strict_calls
from quire.chat.tools import MAX_NAME, Tool, Toolbox
from quire.errors import RequestError
from quire.params import MAX_CHARACTERS, StructuredOutputsParams

_NUMBER = "[0-9]{1,3}"  # of a call
_NUM_LONGEST = 3  # tools that an error names
_ANY_ARGUMENTS: Mapping[str, object] = {"type": "object"}
_ANNOTATIONS = frozenset(
    {*("title", "description", "default", "examples", "example"), *("deprecated", "readOnly", "writeOnly", "$comment")}
)
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"enum", "const"})
# With one of these, an object may have properties that another part of the schema names.
_COMPOSING = ("allOf", "not", "if", "dependentSchemas", "unevaluatedProperties")
_OPENING = frozenset({"additionalProperties", "patternProperties", "anyOf", "oneOf", "$ref"})


def call_constraint(
    format: ToolFormat, toolbox: Toolbox, answer: StructuredOutputsParams | None = None, answer_begin: str = ""
) -> StructuredOutputsParams | None:
    """The constraint for the tools that a request may call; None if nothing has to be constrained.

    answer: the request's constraint on an output without calls. answer_begin: text before such an output.

    "required": the output is calls, and the arguments satisfy the schemas. "auto": the output is free, but for the
    arguments of strict tools, which satisfy their schemas, and for calls of tools that `allowed_tools` leaves out. If
    there are neither, the result is None. "auto" with an answer in JSON: the output is calls, of any other name, too,
    or the answer. Beside another answer, and in a format whose calls begin like JSON, no calls are possible: the result
    is None.
    Raises RequestError if the grammar is too long.
    """
    tools = toolbox.callable_tools
    if not tools:
        return None
    is_parallel = toolbox.parallel and format.has_parallel
    if toolbox.choice.mode == "required":
        asked = [(tool, True) for tool in tools]
        grammar = _Grammar(format, format.forms[0], is_parallel=is_parallel).forced(asked)
        return StructuredOutputsParams(grammar=_not_too_long(grammar, asked), disable_any_whitespace=True)
    asked = [(tool, tool.strict) for tool in tools]
    if answer is not None:
        form = next((form for form in format.forms if _trigger(form)), None)
        if answer.kind != "json" or form is None or _begins_like_json(_trigger(form)):
            return None
        grammar = _Grammar(format, form, is_parallel=is_parallel, barred=toolbox.barred_names).or_answer(
            asked, answer.text, answer_begin
        )
        grammar = _not_too_long(grammar, asked)
        return replace(answer, json=None, json_object=None, grammar=grammar, disable_any_whitespace=answer.is_compact)
    schemas = {tool.name: _enforced(tool) for tool in tools if tool.strict}
    if not schemas and not toolbox.barred_names:
        return None
    grammar = _not_too_long(strict_calls(format, schemas, toolbox.barred_names), asked)
    return StructuredOutputsParams(grammar=grammar, disable_any_whitespace=True)


def _not_too_long(grammar: str, tools: Sequence[tuple[Tool, bool]]) -> str:
    """The grammar. Raises RequestError that names the longest schemas if it is too long for a constraint."""
    if len(grammar) <= MAX_CHARACTERS:
        return grammar
    lengths = {tool.name: len(json.dumps(_enforced(tool))) for tool, is_enforced in tools if is_enforced}
    longest = sorted(lengths, key=lengths.__getitem__, reverse=True)[:_NUM_LONGEST]
    named = f"; the longest schemas are of {', '.join(f'{name} ({lengths[name]:,})' for name in longest)}"
    raise RequestError(
        f"the grammar of the tools has {len(grammar):,} characters, more than {MAX_CHARACTERS:,}, descriptions not "
        f"counted{named if longest else ''}. Shorten the schemas, that of the answer included, or the names, send "
        'fewer tools, allow fewer of them (tool_choice "allowed_tools"), or leave strict out',
        "tools",
    )


def _begins_like_json(trigger: str) -> bool:
    """Whether a trigger cannot be told from JSON by its first character. One with a special token can."""
    return trigger[0] in '{["-0123456789tfn' and not SPECIAL_TOKEN.match(trigger)


def _trigger(form: CallForm) -> str:
    """The text that begins a group of calls; "" if calls begin without markup."""
    return form.begin.strip() or ("" if isinstance(form.call, JsonCall) else form.call.begin.strip())


class _Grammar:
    """Writes grammars for calls in one form. is_parallel: several calls are allowed. barred: names of other tools.

    The methods take the tools, each with whether its schema is enforced.
    """

    def __init__(self, format: ToolFormat, form: CallForm, *, is_parallel: bool, barred: Sequence[str] = ()) -> None:
        self._format = format
        self._form = form
        self._is_parallel = is_parallel
        self._barred = barred

    def forced(self, tools: Sequence[tuple[Tool, bool]]) -> str:
        """The whole output is calls."""
        return "\n".join([f"start: {self._lead()}{self._calls()}", self._tail(tools)])

    def or_answer(self, tools: Sequence[tuple[Tool, bool]], schema: str, begin: str) -> str:
        """Calls, or JSON of a schema behind the text `begin`."""
        start = f"start: {self._lead()}({self._calls()} | {_text(begin)} answer)"
        return "\n".join([start, f"answer: %json {schema}", self._tail(tools)])

    def _lead(self) -> str:
        return f"({_text(self._format.before_calls)})? " if self._format.before_calls else ""

    def _calls(self) -> str:
        """One call or several."""
        form = self._form
        group, end = form.begin + form.open, _text(form.close + form.end)
        first = f"{self._head(group)} tail"
        if not self._is_parallel:
            return f"{first} {end}"
        if form.has_many:
            return f"{first} ({self._head(form.separator)} tail)* {end}"
        return f"{first} {end} ({self._head(form.separator + group)} tail {end})*"

    def _head(self, before: str) -> str:
        """A call up to its name. before: text before the call."""
        call = self._form.call
        if not isinstance(call, JsonCall):
            return _text(before + call.begin + call.name_prefix)
        name = f'{call.names[0]}": "'
        if not call.id:
            return _text(f'{before}{{"{name}')
        number = _text(f'{before}{{"{call.id}": "')
        behind = _quoted(f'", "{name}')
        return f"{number} /{_NUMBER}/ {behind}"

    def _tail(self, tools: Sequence[tuple[Tool, bool]]) -> str:
        """The rule of a call from its name on."""
        enforced = [tool for tool, is_enforced in tools if is_enforced]
        ways: list[tuple[str, Mapping[str, object]]] = [(_quoted(tool.name), _enforced(tool)) for tool in enforced]
        lines = []
        if len(enforced) < len(tools):  # then a call of any other name passes: the client knows which tools there are
            ways.append(("OTHER", _ANY_ARGUMENTS))
            names = " | ".join(map(_quoted, [*(tool.name for tool in enforced), *self._barred]))
            lines = [f"OTHER: /[a-zA-Z0-9_.-]{{1,{MAX_NAME}}}/{f' & ~({names})' if names else ''}"]
        call = self._form.call
        end = _text("}" if isinstance(call, JsonCall) else call.end)
        written = [f"{name} {self._name_end()} {self._arguments(schema)} {end}" for name, schema in ways]
        return "\n".join([f"tail: {' | '.join(written)}", *lines])

    def _name_end(self) -> str:
        """The text from the name up to the arguments."""
        call = self._form.call
        if isinstance(call, JsonCall):
            return _quoted(f'", "{call.arguments[0]}": ')
        number = f"/{_NUMBER}/" if call.is_numbered else ""
        return f"{_text(call.after_name)} {number} {_text(call.name_end)}"

    def _arguments(self, schema: Mapping[str, object]) -> str:
        call = self._form.call
        return arguments_directive("json" if isinstance(call, JsonCall) else call.arguments, schema)


def _text(text: str) -> str:
    """A text as a part of a rule. What looks like a special token is one, if the tokenizer has it."""
    return f"%special {_quoted(text)}" if SPECIAL_TOKEN.search(text) else _quoted(text) if text else ""


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _enforced(tool: Tool) -> dict[str, object]:
    """The schema without annotations. Objects that name properties have no others, unless parts are composed.

    It has the name of the tool for errors.
    """
    written = json.dumps(tool.parameters)
    closes = not any(f'"{keyword}"' in written for keyword in _COMPOSING)
    return {"x-name": f"tool {tool.name}", **_without_annotations(tool.parameters, closes=closes)}


def _without_annotations(schema: Mapping[str, object], *, closes: bool) -> dict[str, object]:
    out: dict[str, object] = {}
    for key, value in schema.items():
        if key in _VALUES:
            out[key] = value
        elif key in _NAMED_SCHEMAS and isinstance(value, Mapping):
            out[key] = {name: _converted(one, closes=closes) for name, one in value.items()}
        elif key not in _ANNOTATIONS:
            out[key] = _converted(value, closes=closes)
    if closes and "properties" in out and not out.keys() & _OPENING:
        out["additionalProperties"] = False
    return out


def _converted(value: object, *, closes: bool) -> object:
    if isinstance(value, list):
        return [_converted(one, closes=closes) for one in value]
    return _without_annotations(value, closes=closes) if isinstance(value, Mapping) else value
