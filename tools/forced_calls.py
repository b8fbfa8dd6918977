"""Tool calls that the embedded model is forced to make: sampled at temperature 1, parsed and validated.

A model of this size rarely ends a text or a list at this temperature. So the schemas get limits that every output
reaches before MAX_TOKENS.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jsonschema

from quire import LLM, SamplingParams
from quire.chat.constraint import call_constraint
from quire.chat.formats import TOOL_FORMATS, ChatFormat
from quire.chat.parser import MessageParser
from quire.chat.parts import message_of
from quire.chat.tools import toolbox
from tools.tool_schemas import SCHEMAS

MAX_TOKENS = 1500
_LIMITS: dict[str, dict[str, Any]] = {
    "string": {"maxLength": 12},
    "array": {"maxItems": 2},
    "integer": {"minimum": -99, "maximum": 99},
    "number": {"minimum": -99, "maximum": 99, "multipleOf": 0.25},
    "object": {"additionalProperties": False},
}


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """One output under the constraint for one tool. fault: why it is no valid call; "" if it is one."""

    format: str
    name: str
    text: str
    fault: str


def forced_calls(llm: LLM, format: str, num_calls: int) -> Iterator[ForcedCall]:
    """Calls in one format, one schema after the other."""
    limited = [replace(one, parameters=_limited(one.parameters)) for one in SCHEMAS]
    chosen = [limited[index % len(limited)] for index in range(num_calls)]
    boxes = [toolbox([one.tool], {"type": "function", "function": {"name": one.name}}) for one in chosen]
    prompts = [
        llm.get_tokenizer().apply_chat_template([{"role": "user", "content": f"Use {one.name}."}], [one.tool])
        for one in chosen
    ]
    params = [
        SamplingParams(
            temperature=1.0,
            seed=seed,
            max_tokens=MAX_TOKENS,
            structured_outputs=call_constraint(TOOL_FORMATS[format], box) if box else None,
        )
        for seed, box in enumerate(boxes)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for one, box, output in zip(chosen, boxes, outputs, strict=True):
        parser = MessageParser(ChatFormat(TOOL_FORMATS[format], None, ""), box, forced=True)
        text = output.outputs[0].text
        message = message_of([*parser.push(text), *parser.finish()])
        fault = "" if output.outputs[0].finish_reason == "stop" else str(output.outputs[0].finish_reason)
        if not fault and (message.content or [call.name for call in message.calls] != [one.name]):
            fault = "not one call alone"
        yield ForcedCall(format, one.name, text, fault or _fault(one.parameters, message.calls[0].arguments))


def _limited(schema: Any) -> Any:  # noqa: ANN401 (a schema or a part of one)
    """The schema with limits of texts, lists and numbers that have none. A value of any type becomes a text."""
    if isinstance(schema, list):
        return [_limited(one) for one in schema]
    if not isinstance(schema, dict) or "enum" in schema or "const" in schema:
        return schema
    named = {"properties", "$defs", "definitions"}
    out = {
        key: {name: _limited(one) for name, one in value.items()} if key in named else _limited(value)
        for key, value in schema.items()
    }
    is_reference = out.keys() & {"$ref", "anyOf", "oneOf"}
    types = out.setdefault("type", "string") if not is_reference else ()
    for name in [types] if isinstance(types, str) else types:
        limits = {} if "format" in out else _LIMITS.get(name, {})
        if isinstance(out.get("items"), dict) and "$ref" in out["items"]:  # recursion may go on
            limits = {"maxItems": 0}
        out = {**limits, **out} if name != "object" else {**out, **limits}
    return out


def _fault(schema: dict[str, object], arguments: str) -> str:
    """What is wrong with arguments, or ""."""
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(arguments))
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).partition("\n")[0]
    return ""
