"""The measured constraints: schemas and patterns that applications use."""

import json
from collections.abc import Mapping
from types import MappingProxyType

from quire.params import StructuredOutputsParams

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "maxLength": 40},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 30},
                "city": {"type": "string", "maxLength": 20},
                "kind": {"enum": ["home", "work", "other"]},
            },
            "required": ["street", "city", "kind"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "email", "tags", "address"],
    "additionalProperties": False,
}
_CALL = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"tool": {"const": name}, "arguments": {"type": "object", "properties": arguments}},
            "required": ["tool", "arguments"],
            "additionalProperties": False,
        }
        for name, arguments in {
            "search": {"query": {"type": "string"}, "limit": {"type": "integer"}},
            "weather": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
            "mail": {"to": {"type": "string"}, "body": {"type": "string"}},
        }.items()
    ]
}
FORMS: Mapping[str, StructuredOutputsParams] = MappingProxyType(
    {
        "person": StructuredOutputsParams(json=json.dumps(_PERSON)),
        "person, free white space": StructuredOutputsParams(json=json.dumps(_PERSON), disable_any_whitespace=False),
        "tool call": StructuredOutputsParams(json=json.dumps(_CALL)),
        "date and time": StructuredOutputsParams(regex=r"20[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9] [0-2][0-9]:[0-5][0-9]"),
        "one of 100": StructuredOutputsParams(choice=tuple(f"class {i * 7919 % 1000}: item {i}" for i in range(100))),
        "any object": StructuredOutputsParams(json_object=True),
    }
)
EVER: Mapping[str, StructuredOutputsParams] = MappingProxyType(  # for outputs of any length
    {
        "words": StructuredOutputsParams(regex="([a-z]+ )+[a-z]+\\."),
        "list of strings": StructuredOutputsParams(
            json=json.dumps({"type": "array", "items": {"type": "string", "minLength": 8}, "minItems": 1000})
        ),
    }
)
