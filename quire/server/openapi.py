"""Bounds, errors, keys and examples in the OpenAPI document.

FastAPI generates the document from the pydantic models, which have the types. SamplingParams and Terms check the
values, as in the offline interface, so their bounds are added here.
"""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

from quire.core.scheduling_params import MAX_NAME_LEN, MAX_PROGRAM_TTL, MAX_SECONDS
from quire.engine.embeddings import POOLINGS
from quire.params import (
    MAX_BAD_WORDS,
    MAX_CHARACTERS,
    MAX_LENGTH_PENALTY,
    MAX_LISTED_TOKENS,
    MAX_LOGPROB_IDS,
    MAX_SCHEMA,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    MAX_TOKENS,
    MAX_WHITESPACE,
    NUMBERS,
)
from quire.server.api.openai.schema import NO_LIMIT
from quire.server.middleware.auth import OPEN_PATHS
from quire.server.request_params import NEUTRAL
from quire.server.service import Service

Keywords = Mapping[str, object]  # of JSON Schema
Limits = Mapping[str, Keywords]  # by JSON type: of a field, and of the items of its list


def _number_limits() -> dict[str, Limits]:
    limits: dict[str, Limits] = {}
    for name, (_, low, high) in NUMBERS.items():
        above = name in ("top_p", "repetition_penalty")  # 0 is not allowed
        bounds: Keywords = {"exclusiveMinimum" if above else "minimum": low, "maximum": high}
        limits[name] = {"integer": bounds, "number": bounds}
    limits["truncate_prompt_tokens"] = {"integer": {**limits["truncate_prompt_tokens"]["integer"], "not": {"const": 0}}}
    for name, ours in _OTHER_NAMES.items():
        limits[name] = limits[ours]
    for name in ("max_tokens", "max_completion_tokens"):
        limits[name] = {"integer": {**limits[name]["integer"], "minimum": NO_LIMIT}}
    return limits


_OTHER_NAMES = {  # a route's name of a number -> the engine's name
    **{"max_completion_tokens": "max_tokens", "top_logprobs": "logprobs"},
    **{"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"},
    **{"top_logprobs_num": "logprobs", "max_output_tokens": "max_tokens", "repeat_penalty": "repetition_penalty"},
}
_TEXT: Keywords = {"minLength": 1, "maxLength": MAX_STOP_LENGTH}
_TOKENS = (
    *("prompt", "input", "input_ids", "tokens", "stop_token_ids", "allowed_token_ids"),
    *("logprob_token_ids", "token_ids_logprob", "label_token_ids"),
)
_SCHEMA_FIELDS = ("json", "schema", "json_schema", "guided_json")
_CONSTRAINT_FIELDS = ("regex", "grammar", "structural_tag", "ebnf", "guided_regex", "guided_grammar")
_SECONDS: Keywords = {"exclusiveMinimum": 0, "maximum": MAX_SECONDS}

LIMITS: Mapping[str, Limits] = {
    **_number_limits(),
    **{name: {"string": _TEXT, "array": {"maxItems": MAX_STOPS}} for name in ("stop", "stop_sequences")},
    "bad_words": {"string": _TEXT, "array": {"maxItems": MAX_BAD_WORDS}},
    "stop_token_ids": {"array": {"maxItems": MAX_STOPS}},
    "allowed_token_ids": {"array": {"minItems": 1, "maxItems": MAX_LISTED_TOKENS}},
    "logprob_token_ids": {"array": {"maxItems": MAX_LOGPROB_IDS}},
    "label_token_ids": {"array": {"minItems": 1, "maxItems": MAX_LOGPROB_IDS}},
    "logit_bias": {
        "object": {
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_LISTED_TOKENS,
        }
    },
    **{name: {"string": {"minLength": 1, "maxLength": MAX_SCHEMA}} for name in _SCHEMA_FIELDS},
    **{name: {"string": {"minLength": 1, "maxLength": MAX_CHARACTERS}} for name in _CONSTRAINT_FIELDS},
    **{name: {"string": {"minLength": 1}, "array": {"minItems": 1}} for name in ("choice", "guided_choice")},
    "whitespace_pattern": {"string": {"minLength": 1, "maxLength": MAX_WHITESPACE}},
    "length_penalty": {"number": {"minimum": -MAX_LENGTH_PENALTY, "maximum": MAX_LENGTH_PENALTY}},
    "early_stopping": {"string": {"const": "never"}},
    "deadline": {"number": _SECONDS},
    "ttl": {"number": {"minimum": 0, "maximum": MAX_SECONDS}},
    "session": {"string": {"minLength": 1, "maxLength": MAX_NAME_LEN}},
    "messages": {"array": {"minItems": 1}},
    **{name: {"string": {"minLength": 1}, "array": {"minItems": 1}} for name in ("prompt", "input", "input_ids")},
    "text": {"array": {"minItems": 1}},
    "pooling": {"string": {"enum": list(POOLINGS)}},
    "logprob_start_len": {"integer": {"minimum": -1}},
}
_ID: Limits = {"string": {"minLength": 1, "maxLength": MAX_NAME_LEN}}
_BRANCH: Limits = {"string": {"maxLength": MAX_NAME_LEN}}
_LIMITS_BY_SCHEMA: Mapping[
    str, Mapping[str, Limits]
] = {  # by schema, for fields whose names have other limits elsewhere
    "MessagesBody": {"max_tokens": {"integer": {"minimum": 0, "maximum": MAX_TOKENS}}},
    "OllamaOptions": {"num_predict": {"integer": {"maximum": MAX_TOKENS}}},
    "RerankBody": {"top_n": {"integer": {"minimum": 0}}},
    "RetentionBody": {"priority": {"integer": {"minimum": 0, "maximum": 100}}},
    "ProgramBody": {"id": _ID, "branch": _BRANCH, "ttl": {"number": {"minimum": 0, "maximum": MAX_PROGRAM_TTL}}},
    "EndProgramBody": {"id": _ID, "branch": _BRANCH},
    **{name: {"lora_name": _ID} for name in ("LoadAdapterBody", "UnloadAdapterBody")},
    "ResponseBody": {"input": {"string": {}}},
}

_HELLO = {"role": "user", "content": "Hello! Who are you?"}
_STORY = "One Tuesday Mira went"
_NAMED = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}
_TOOL = {"name": "keep", "description": "Keep a name", "input_schema": _NAMED}
_BY_SCHEMA = {"type": "json_schema", "json_schema": {"name": "named", "schema": _NAMED}}
EXAMPLES: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    "/v1/completions": {
        "greedy": {"value": {"prompt": _STORY, "max_tokens": 16, "temperature": 0, "stop": ["."]}},
        "form": {"value": {"prompt": _STORY, "structured_outputs": {"choice": [" home", " away"]}}},
        "several": {"value": {"prompt": [_STORY, "Hello"], "n": 2, "seed": 1, "max_tokens": 8, "logprobs": 2}},
        "beams": {"value": {"prompt": _STORY, "use_beam_search": True, "n": 2, "max_tokens": 8, "length_penalty": 0.5}},
    },
    "/v1/chat/completions": {
        "whole": {"value": {"messages": [_HELLO], "max_tokens": 16, "temperature": 0.7, "top_p": 0.9}},
        "streamed": {"value": {"messages": [_HELLO], "max_tokens": 8, "stream": True}},
        "form": {"value": {"messages": [_HELLO], "max_tokens": 40, "response_format": _BY_SCHEMA}},
        "logprobs": {"value": {"messages": [_HELLO], "max_tokens": 4, "logprobs": True, "top_logprobs": 2}},
    },
    "/v1/responses": {
        "whole": {"value": {"input": "Hello! Who are you?", "max_output_tokens": 16, "store": False}},
        "streamed": {"value": {"input": [_HELLO], "max_output_tokens": 8, "stream": True}},
        "form": {
            "value": {
                "input": [_HELLO],
                "max_output_tokens": 40,
                "text": {"format": {"type": "json_schema", "name": "named", "schema": _NAMED}},
            }
        },
    },
    "/v1/embeddings": {"vectors": {"value": {"input": [_STORY, "Hello"], "encoding_format": "base64"}}},
    "/v1/messages": {
        "whole": {"value": {"messages": [_HELLO], "max_tokens": 16, "temperature": 0}},
        "streamed": {"value": {"messages": [_HELLO], "max_tokens": 8, "stream": True}},
        "tools": {"value": {"messages": [_HELLO], "max_tokens": 8, "tools": [_TOOL]}},
    },
    "/v1/messages/count_tokens": {"chat": {"value": {"messages": [_HELLO], "tools": [_TOOL]}}},
    "/api/chat": {
        "whole": {"value": {"messages": [_HELLO], "stream": False, "options": {"num_predict": 8}}},
        "streamed": {"value": {"messages": [_HELLO], "options": {"num_predict": 8, "temperature": 0}}},
    },
    "/api/generate": {
        "chat": {"value": {"prompt": "Hello!", "options": {"num_predict": 8}}},
        "raw": {"value": {"prompt": _STORY, "raw": True, "options": {"num_predict": 8}}},
    },
    "/api/embed": {"vectors": {"value": {"input": [_STORY, "Hello"]}}},
    "/api/embeddings": {"vector": {"value": {"prompt": _STORY}}},
    **{path: {"pairs": {"value": {"text_1": "Hello", "text_2": [_STORY, "a"]}}} for path in ("/score", "/v1/score")},
    **{
        path: {"best": {"value": {"query": "Hello", "documents": [_STORY, "a"], "top_n": 1}}}
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    },
    "/generate": {
        "one": {"value": {"text": _STORY, "sampling_params": {"max_new_tokens": 8, "temperature": 0}}},
        "form": {"value": {"text": _STORY, "sampling_params": {"max_new_tokens": 8, "regex": " [a-z]{3}"}}},
    },
    "/tokenize": {"text": {"value": {"prompt": _STORY}}, "chat": {"value": {"messages": [_HELLO]}}},
    "/detokenize": {"text": {"value": {"tokens": [67, 68, 69]}}},
    **{
        path: {"below --lora-dir": {"value": {"lora_name": "poet", "lora_path": "poet"}}}
        for path in ("/v1/load_lora_adapter", "/load_lora_adapter")
    },
    **{
        path: {"by name": {"value": {"lora_name": "poet"}}}
        for path in ("/v1/unload_lora_adapter", "/unload_lora_adapter")
    },
    "/v1/programs/end": {"branch": {"value": {"id": "run-1", "branch": "1"}}, "whole": {"value": {"id": "run-1"}}},
}

ERROR: Keywords = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The invalid field."},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_OTHER_TYPES = {  # of responses, by path
    "/metrics": "text/plain",
    "/monitor": "text/event-stream",
    "/v1/files/{id}/content": "application/octet-stream",
}
_OLLAMA = "/api/"  # its routes have errors and streams of their own
OLLAMA_ERROR: Keywords = {
    "type": "object",
    "required": ["error", "param", "code"],
    "properties": {
        "error": {"type": "string"},
        "param": {"type": ["string", "null"], "description": "The invalid field."},
        "code": {"type": ["string", "null"]},
    },
}
_STATUS: Keywords = {"type": "object", "required": ["status"], "properties": {"status": {"type": "string"}}}


def describe_api(app: FastAPI, service: Service, *, with_keys: bool) -> None:
    """Replace `app.openapi` by one that adds them. with_keys: whether requests need an API key."""
    token: Keywords = {"minimum": 0, "maximum": service.vocab_size - 1}
    tokens: dict[str, Limits] = {name: {**LIMITS.get(name, {}), "integer": token} for name in _TOKENS}
    limits: Mapping[str, Limits] = {**LIMITS, **tokens}
    plain = app.openapi
    done: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not done:
            done.update(_augmented(plain(), limits, with_keys=with_keys))
        return done

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI documents it


def _augmented(document: dict[str, Any], limits: Mapping[str, Limits], *, with_keys: bool) -> dict[str, Any]:
    parts = document["components"]
    schemas = parts["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's error format, which no route of this app uses
        schemas.pop(name, None)
    for name, schema in schemas.items():
        for field, value in schema["properties"].items():
            _add_limits(value, _LIMITS_BY_SCHEMA.get(name, {}).get(field) or limits.get(field, {}))
    schemas["Error"], schemas["OllamaError"] = ERROR, OLLAMA_ERROR
    if with_keys:
        parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if path in EXAMPLES:
                operation["requestBody"]["content"]["application/json"]["examples"] = EXAMPLES[path]
            operation["responses"] = _responses(path, operation["responses"]["200"], _has_stream(operation, schemas))
            if with_keys and not (path in OPEN_PATHS and method == "get"):
                operation["security"] = [{"key": []}]
    return document


def _add_limits(schema: dict[str, Any], limits: Limits, *, in_list: bool = False) -> None:
    """Add the limits to a field's schema, in place. in_list: whether `schema` describes items of a list."""
    if NEUTRAL in schema:
        schema["enum"] = [None, *schema[NEUTRAL]]
    for branch in schema.get("anyOf", ()):
        _add_limits(branch, limits, in_list=in_list)
    kind = str(schema.get("type"))
    if not (in_list and kind == "array"):
        schema.update(limits.get(kind, {}))
    if kind == "array":
        _add_limits(schema["items"], limits, in_list=True)


def _has_stream(operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> bool:
    content = operation.get("requestBody", {}).get("content", {})
    if "application/json" not in content:
        return False
    name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
    return "stream" in schemas[name]["properties"]


def _stream_type(path: str) -> str:
    return "application/x-ndjson" if path.startswith(_OLLAMA) else "text/event-stream"


def _responses(path: str, good: Mapping[str, Any], streams: bool) -> dict[str, object]:  # noqa: FBT001 (a fact)
    content: Mapping[str, object] = good["content"]
    if streams:
        content = {**content, _stream_type(path): {"schema": {}}}
    if path in _OTHER_TYPES:
        content = {_OTHER_TYPES[path]: {"schema": {"type": "string"}}}
    error = "OllamaError" if path.startswith(_OLLAMA) else "Error"
    problem = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}
    health = {"application/json": {"schema": _STATUS}}
    return {
        "200": {**good, "content": content},
        "4XX": {
            "description": "The request cannot be served as it is; the error says what to change.",
            "content": problem,
        },
        "503": {
            "description": "Not now: the server is starting or shutting down, or its engine does not respond.",
            "content": health if path in ("/ready", "/health") else problem,
        },
    }
