"""The bodies of OpenAI's API, and vLLM's fields beside them. Knows names, sends nothing."""

import json
from collections.abc import Mapping
from typing import Any

from quire.errors import RequestError
from quire.lang.params import GenParams

_PLAIN = GenParams()


def sampling(params: GenParams, *, extensions: bool) -> dict[str, object]:
    """How tokens are chosen and when it ends. Raises RequestError for what the endpoint does not know."""
    asked: dict[str, object] = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
    }
    for name in ("frequency_penalty", "presence_penalty", "n", "seed"):
        if getattr(params, name) != getattr(_PLAIN, name):
            asked[name] = getattr(params, name)
    if params.stop:
        asked["stop"] = list(params.stop)
    return {**asked, **_extra(params, extensions=extensions), **_form(params, extensions=extensions)}


def completion_logprobs(params: GenParams) -> dict[str, object]:
    """What completions tell of tokens."""
    return {"logprobs": params.top_logprobs_num or 0} if params.return_logprob else {}


def chat_logprobs(params: GenParams) -> dict[str, object]:
    """What chat tells of tokens."""
    if not params.return_logprob:
        return {}
    return {"logprobs": True, **({"top_logprobs": params.top_logprobs_num} if params.top_logprobs_num else {})}


def text_of(choice: Mapping[str, Any], part: str) -> str:
    """Of a completion, or of a chat's message or delta."""
    if "text" in choice:
        return choice["text"] or ""
    return (choice.get(part) or {}).get("content") or ""


def meta_of(
    answer: Mapping[str, Any], choice: Mapping[str, Any], usage: Mapping[str, Any], prompt_length: int | None
) -> dict[str, Any]:
    """As SGLang tells it. prompt_length: of a whole completion; characters."""
    reason = choice.get("finish_reason")
    why = {"type": reason} if reason else None
    if reason in ("error", "abort"):
        why = {"type": reason, "message": choice.get("stop_reason")}
    meta = {"id": answer.get("id"), "finish_reason": why, **usage}
    logprobs = choice.get("logprobs")
    if logprobs:
        meta["logprobs"] = logprobs
    if prompt_length is not None and logprobs and logprobs.get("text_offset"):
        meta["token_offsets"] = _relative(logprobs["text_offset"])
    return meta


def _relative(offsets: list[int]) -> list[int]:
    """From the output's beginning: some endpoints count from the prompt's."""
    return [offset - offsets[0] for offset in offsets]


def _extra(params: GenParams, *, extensions: bool) -> dict[str, object]:
    names = ("top_k", "min_p", "stop_token_ids", "ignore_eos", "min_tokens")
    said = [name for name in names if getattr(params, name) != getattr(_PLAIN, name)]
    if said and not extensions:
        raise RequestError(
            f"OpenAI's API has no {', '.join(said)}; leave it out, or make OpenAI(..., extensions=True) where the "
            "endpoint knows vLLM's fields",
            said[0],
        )
    values = {name: getattr(params, name) for name in said}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _form(params: GenParams, *, extensions: bool) -> dict[str, object]:
    if params.form is None:
        return {}
    kind, text = params.form
    if kind == "json_schema":
        schema = {"name": "output", "schema": json.loads(text), "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if not extensions:
        raise RequestError(
            f"OpenAI's API has no {kind}; use json_schema, or make OpenAI(..., extensions=True) where the endpoint "
            "knows vLLM's structured_outputs",
            kind,
        )
    return {"structured_outputs": {"regex" if kind == "regex" else "grammar": text}}
