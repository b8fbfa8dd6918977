"""Structural tags: free text, in which what stands between a beginning and an end has a form. In the format of vLLM.

    {"type": "structural_tag",
     "structures": [{"begin": "<function=f>", "schema": {...}, "end": "</function>"}],
     "triggers": ["<function="]}

Where a trigger came, one of the structures that begin with it has to follow.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

from quire.errors import RequestError
from quire.structured import StructuredOutputsParams
from quire.structured_outputs.json_schema.reader import Schema, read_schema

_PARAM = "structural_tag"
_MAX_TAGS = 256
_MAX_TEXT = 1024  # characters of a trigger, a beginning or an end


@dataclass(frozen=True, slots=True)
class Tag:
    """One structure. trigger: what it begins with, first of all."""

    trigger: str
    begin: str
    schema: Schema
    end: str


def read_tags(asked: StructuredOutputsParams) -> list[Tag]:
    """The structures that are asked for. Raises RequestError that says which is wrong."""
    value = json.loads(asked.text)
    if not isinstance(value, dict) or value.get("type", "structural_tag") != "structural_tag":
        raise RequestError(
            'structural_tag is {"type": "structural_tag", "structures": [...], "triggers": [...]}', _PARAM
        )
    if "format" in value:
        raise RequestError("structural_tag: format is not supported; use structures and triggers", _PARAM)
    unknown = value.keys() - {"type", "structures", "triggers"}
    if unknown:
        raise RequestError(f"structural_tag: unknown field {min(unknown)!r:.100}", _PARAM)
    triggers = value.get("triggers")
    if not isinstance(triggers, list) or not triggers or len(triggers) > _MAX_TAGS:
        raise RequestError(f"structural_tag: triggers is a list of 1 to {_MAX_TAGS} strings", _PARAM)
    for index, trigger in enumerate(triggers):
        _check_text(trigger, f"triggers/{index}", at_least=1)
    structures = value.get("structures")
    if not isinstance(structures, list) or not structures or len(structures) > _MAX_TAGS:
        raise RequestError(f"structural_tag: structures is a list of 1 to {_MAX_TAGS} objects", _PARAM)
    return [_tag(one, f"structures/{i}", triggers, asked) for i, one in enumerate(structures)]


def tags_to_lark(tags: list[Tag], write: Callable[[Schema], object]) -> str:
    """A grammar of free text and tags. write: what is to stand for a schema."""
    triggers = list(dict.fromkeys(tag.trigger for tag in tags))
    lines = [
        f"start: ({' | '.join(f'after{i}' for i in range(len(triggers)))})* rest",
        "rest: TEXT",
        "TEXT: /(?s:.)*/",
    ]
    for index, trigger in enumerate(triggers):
        options = " | ".join(f"tag{i}" for i, tag in enumerate(tags) if tag.trigger == trigger)
        # Lazy: the free text ends with the first trigger in it.
        lines += [f"head{index}[lazy]: TEXT {_quoted(trigger)}", f"after{index}: head{index} ({options})"]
    for index, tag in enumerate(tags):
        begin = _quoted(tag.begin.removeprefix(tag.trigger))
        lines.append(f"tag{index}: {begin} %json {json.dumps(write(tag.schema))} {_quoted(tag.end)}")
    return "\n".join(lines) + "\n"


def _tag(value: object, at: str, triggers: list[str], asked: StructuredOutputsParams) -> Tag:
    if not isinstance(value, dict) or value.keys() - {"begin", "schema", "end"} or "begin" not in value:
        raise RequestError(f"structural_tag: {at} is an object with begin, schema and end", _PARAM)
    begin, end = value["begin"], value.get("end", "")
    _check_text(begin, f"{at}/begin", at_least=1)
    _check_text(end, f"{at}/end", at_least=0)
    trigger = next((one for one in triggers if begin.startswith(one)), None)
    if trigger is None:
        raise RequestError(f"structural_tag: {at}/begin begins with none of the triggers", _PARAM)
    schema = read_schema(json.dumps(value.get("schema", True)), _PARAM, closed=asked.disable_additional_properties)
    return Tag(trigger, begin, schema, end)


def _check_text(value: object, at: str, *, at_least: int) -> None:
    if not isinstance(value, str) or not at_least <= len(value) <= _MAX_TEXT:
        raise RequestError(f"structural_tag: {at} is a string of {at_least} to {_MAX_TEXT} characters", _PARAM)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else '""'
