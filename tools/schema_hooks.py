"""Schemathesis hooks for fields that exclude each other, which OpenAPI cannot express.

Without them most generated requests would be rejected for the same few reasons and never reach the engine.
"""

import json
import zlib
from typing import Any

import schemathesis

# A field -> the field that it needs.
NEEDS = {
    **{"tool_choice": "tools", "top_logprobs": "logprobs", "stream_options": "stream", "logprob_token_ids": "logprobs"},
    **{
        "length_penalty": "use_beam_search",
        "early_stopping": "use_beam_search",
        "return_text_in_logprobs": "return_logprob",
    },
    **{
        "logprob_start_len": "return_logprob",
        "top_logprobs_num": "return_logprob",
        "token_ids_logprob": "return_logprob",
    },
}
EITHER = (("prompt", "messages"), ("text", "input_ids"))
HURRIED = ("deadline", "timeout")  # seconds; below one the outcome is random
# Constraints that a small model fulfils quickly. Few random ones are valid.
FORMS = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}},
    "structured_outputs": {"choice": ["yes", "no"]},
    **{name: {"enum": [1, 2]} for name in ("json_schema", "guided_json")},
    **dict.fromkeys(("regex", "guided_regex"), "[ab]{1,2}"),
    **dict.fromkeys(("ebnf", "guided_grammar"), 'root ::= "a" | "b"'),
    "guided_choice": ["a", "b"],
    "structural_tag": {"type": "structural_tag", "format": {"type": "any_text"}},
}
AS_IT_IS = 4  # one of this many cases stays unchanged
OF_SEARCHES = frozenset(
    ("model", "prompt", "messages", "n", "best_of", "max_tokens", "use_beam_search", "length_penalty", "early_stopping")
)
SHORT = 2  # tokens; longer outputs take time and test nothing new


@schemathesis.hook
def before_call(_context: schemathesis.HookContext, case: schemathesis.Case, _kwargs: dict[str, Any]) -> None:
    """Remove fields that would be rejected beside the others."""
    body = case.body
    if not isinstance(body, dict):
        return
    for field in HURRIED:
        if isinstance(body.get(field), int | float) and 0 < body[field] < 1:
            body.pop(field)
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    _pair(body)
    if case.path == "/v1/messages":
        body["max_tokens"] = SHORT
    if case.path in ("/api/chat", "/api/generate"):
        body["options"] = {**(body.get("options") or {}), "num_predict": SHORT}
    if "completions" in case.path:
        _shorten(body, "max_tokens", "min_tokens")
        body.pop("max_completion_tokens", None)
    if case.path == "/v1/responses":
        _shorten(body, "max_output_tokens", "min_tokens")
    for params in _listed(body.get("sampling_params", {})) if case.path == "/generate" else ():
        _shorten(params, "max_new_tokens", "min_new_tokens")
        _form(params)


def _pair(body: dict[str, Any]) -> None:
    for field in [field for field in body if body.get("use_beam_search") and field not in OF_SEARCHES]:
        body.pop(field)
    for field, other in NEEDS.items():
        if not body.get(other):
            body.pop(field, None)
    for field, other in EITHER:
        if body.get(field) is not None and body.get(other) is not None:
            body.pop(other)
    counts = [body.get("best_of") or 128, body.get("n") or 1]
    if all(isinstance(count, int) for count in counts) and counts[0] < counts[1]:
        body.pop("best_of")
    _form(body)
    body.pop("retention", None)  # it needs a server with an eviction policy for it


def _form(fields: dict[str, Any]) -> None:
    """Keep one constraint, which is valid in most cases."""
    given = [name for name in FORMS if fields.get(name) is not None]
    for name in given[1:]:
        fields.pop(name)
    written = json.dumps([fields[name] for name in given[:1]], sort_keys=True, default=str)
    if given and zlib.crc32(written.encode()) % AS_IT_IS:
        fields[given[0]] = FORMS[given[0]]


def _shorten(params: dict[str, Any], most: str, least: str) -> None:
    given = {name: params[name] for name in (most, least) if isinstance(params.get(name), int)}
    params[most] = min(SHORT, given.get(most, SHORT))
    params[least] = min(given.get(least, 0), params[most])


def _listed(value: Any) -> list[dict[str, Any]]:  # noqa: ANN401 (JSON)
    return value if isinstance(value, list) else [value or {}]
