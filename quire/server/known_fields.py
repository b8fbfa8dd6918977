"""Fields that other servers document and no route of quire has as its own, and what is done with them.

This table is the only place for them. A field of a body is the route's own (the models of the routes have those), or in
this table, or unknown. An unknown one is refused, with the nearest known name.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import JsonValue
from pydantic_core import PydanticCustomError

Fields = Mapping[str, Any]
Meaning = Callable[[Any, Collection[str]], Fields | None]

OPENAI, AZURE, VLLM, SGLANG, LLAMA, OLLAMA = "OpenAI", "Azure", "vLLM", "SGLang", "llama.cpp", "Ollama"
TGI, LM_STUDIO, OPENROUTER, DEEPSEEK, ANTHROPIC = "TGI", "LM Studio", "OpenRouter", "DeepSeek", "Anthropic"


class Known(NamedTuple):
    """A field of other servers. With none of own, meaning and accepted it is taken without effect, and reported.

    servers: those that document it. own: the field of quire that it is another name for; the field is unknown where a
    route does not have that. meaning: the own fields that a value stands for, given the names that the route has; None
    if the value has no effect. accepted: the values that change nothing; others are refused.
    """

    servers: tuple[str, ...]
    own: str = ""
    meaning: Meaning | None = None
    accepted: tuple[JsonValue, ...] | None = None
    overrides: bool = False  # whether its meaning counts whatever the body has for the own fields
    instead: str = ""  # what to do about a refused value


class Split(NamedTuple):
    """The fields of a body. own: with those that others stand for. renamed: own names -> those in the body.

    ignored: names without effect. unknown: names that are neither own nor in the table, except those that are null.
    """

    own: dict[str, Any]
    renamed: dict[str, str]
    ignored: list[str]
    unknown: list[Any]


def _think(value: Any, own: Collection[str]) -> Fields | None:  # noqa: ANN401 (of any type)
    """Ollama's `think`: whether the model reasons, or how much (low, medium, high)."""
    if isinstance(value, bool):
        return _of({"enable_thinking": value}, own)
    return _of({"reasoning_effort": value}, own) if value in ("low", "medium", "high") else _WRONG


def _thinking(value: Any, own: Collection[str]) -> Fields | None:  # noqa: ANN401
    """DeepSeek's `thinking`: an object with the type enabled or disabled, and perhaps budget_tokens."""
    if not isinstance(value, Mapping) or value.get("type") not in ("enabled", "disabled"):
        return _WRONG
    budget = {"thinking_token_budget": value["budget_tokens"]} if value.get("budget_tokens") is not None else {}
    return _of({"enable_thinking": value["type"] == "enabled", **budget}, own)


def _reasoning(value: Any, own: Collection[str]) -> Fields | None:  # noqa: ANN401
    """OpenRouter's `reasoning`: an object with effort, max_tokens, enabled, exclude."""
    names = {"effort": "reasoning_effort", "max_tokens": "thinking_token_budget", "enabled": "enable_thinking"}
    if not isinstance(value, Mapping) or value.keys() - names.keys() - {"exclude"}:
        return _WRONG
    found = {ours: value[theirs] for theirs, ours in names.items() if value.get(theirs) is not None}
    if value.get("exclude") is not None:
        if not isinstance(value["exclude"], bool):
            return _WRONG
        found["include_reasoning"] = not value["exclude"]
    return _of(found, own)


def _reasoning_format(value: Any, own: Collection[str]) -> Fields | None:  # noqa: ANN401
    """llama.cpp's `reasoning_format`: none leaves reasoning in the content; auto and deepseek return it apart."""
    known = {"none": False, "auto": True, "deepseek": True}
    separates = known.get(value) if isinstance(value, str) else None
    return _WRONG if separates is None else _of({"separate_reasoning": separates}, own)


def _probabilities(value: Any, own: Collection[str]) -> Fields | None:  # noqa: ANN401
    """llama.cpp's `n_probs`: logprobs of so many tokens; 0 asks for none."""
    if type(value) is not int:
        return _WRONG
    if value == 0:
        return {}
    return _of({"logprobs": True, "top_logprobs": value} if "top_logprobs" in own else {"logprobs": value}, own)


def _penalised_window(value: Any, own: Collection[str]) -> Fields | None:  # noqa: ANN401
    """llama.cpp's `repeat_last_n`: -1 is the whole context, as in quire; 0 turns the penalty off."""
    if type(value) is not int:
        return _WRONG
    return _of({"repetition_penalty": 1.0}, own) if value == 0 else {} if value == -1 else None


_WRONG: Fields = MappingProxyType({"": None})  # the meaning of a value of another type


def _of(found: Fields, own: Collection[str]) -> Fields | None:
    """The fields, if the route has them; else they are without effect."""
    return found if found.keys() <= set(own) else None


_SAMPLERS: Mapping[str, Known] = MappingProxyType(  # of llama.cpp, with the values that turn them off
    {
        "typical_p": Known((LLAMA, OLLAMA, TGI), accepted=(1,)),
        "tfs_z": Known((LLAMA, OLLAMA), accepted=(1,)),
        "top_n_sigma": Known((LLAMA,), accepted=(-1,)),
        "mirostat": Known((LLAMA, OLLAMA), accepted=(0,)),
        "dynatemp_range": Known((LLAMA,), accepted=(0,)),
        "xtc_probability": Known((LLAMA,), accepted=(0,)),
        "dry_multiplier": Known((LLAMA,), accepted=(0,)),
        "adaptive_target": Known((LLAMA,), accepted=(-1,)),
        "min_keep": Known((LLAMA,), accepted=(0,)),
        **{name: Known((LLAMA, OLLAMA)) for name in ("mirostat_tau", "mirostat_eta")},  # of samplers above
        **{name: Known((LLAMA,)) for name in ("dynatemp_exponent", "xtc_threshold", "adaptive_decay")},
        **{name: Known((LLAMA,)) for name in ("dry_base", "dry_allowed_length", "dry_penalty_last_n")},
        "dry_sequence_breakers": Known((LLAMA,)),
    }
)

_BODY: Mapping[str, Known] = MappingProxyType(
    {
        # other names
        "n_predict": Known((LLAMA,), own="max_tokens"),
        "repeat_penalty": Known((LLAMA, OLLAMA, LM_STUDIO), own="repetition_penalty"),
        "no_stop_trim": Known((SGLANG,), own="include_stop_str_in_output"),
        "return_tokens": Known((LLAMA,), own="return_token_ids"),
        # other forms
        "repeat_last_n": Known((LLAMA, OLLAMA), meaning=_penalised_window, overrides=True),
        "n_probs": Known((LLAMA,), meaning=_probabilities),
        "reasoning_format": Known((LLAMA,), meaning=_reasoning_format),
        "think": Known((OLLAMA,), meaning=_think),
        "thinking": Known((DEEPSEEK,), meaning=_thinking),
        "reasoning": Known((OPENROUTER,), meaning=_reasoning),
        # refused unless they change nothing
        **_SAMPLERS,
        "top_a": Known((OPENROUTER,), accepted=(0,)),
        "lora": Known((LLAMA,), accepted=([],), instead="name an adapter in model"),
        "lora_path": Known((SGLANG,), accepted=(), instead="name an adapter in model"),
        "adapter_id": Known((TGI,), accepted=(), instead="name an adapter in model"),
        "logits_processors": Known((VLLM,), accepted=([],), instead="LLM(logits_processors=...) takes them offline"),
        "custom_logit_processor": Known(
            (SGLANG,), accepted=(), instead="LLM(logits_processors=...) takes them offline"
        ),
        "return_hidden_states": Known((SGLANG,), accepted=(False,), instead="/v1/embeddings returns vectors"),
        "return_routed_experts": Known((SGLANG,), accepted=(False,)),
        "post_sampling_probs": Known((LLAMA,), accepted=(False,)),
        "kv_transfer_params": Known((VLLM,), accepted=(), instead="quire computes prompt and output on one server"),
        "session_params": Known((SGLANG,), accepted=(), instead="send the whole conversation"),
        "watermark": Known((TGI,), accepted=(False,)),
        "image_data": Known((LLAMA, SGLANG), accepted=([],), instead="quire serves text models only"),
        "data_sources": Known((AZURE,), accepted=([],), instead="put the texts that were found into the messages"),
        # without effect
        **{
            name: Known((OPENAI, AZURE))
            for name in (
                *("user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_options"),
                *("prompt_cache_retention", "safety_identifier", "verbosity", "web_search_options"),
                *("max_tool_calls", "client_metadata"),
            )
        },
        "user_security_context": Known((AZURE,)),
        **{
            name: Known((ANTHROPIC,))
            for name in (
                *("inference_geo", "user_profile_id", "workspace_id", "diagnostics", "anthropic_version"),
                *("anthropic_beta", "betas"),
            )
        },
        **{
            name: Known((VLLM,))
            for name in (
                *("guided_decoding_backend", "guided_whitespace_pattern", "request_id", "mm_processor_kwargs"),
                *("media_io_kwargs", "vllm_xargs"),
            )
        },
        **{
            name: Known((SGLANG,))
            for name in (
                *(
                    "log_metrics",
                    "rid",
                    "stream_reasoning",
                    "bootstrap_host",
                    "bootstrap_port",
                    "bootstrap_room",
                ),
                *("return_cached_tokens_details", "return_meta_info", "custom_params", "data_parallel_rank"),
                *("max_dynamic_patch", "min_dynamic_patch", "routing_key"),
            )
        },
        **{
            name: Known((LLAMA,))
            for name in (
                *("cache_prompt", "id_slot", "n_keep", "n_discard", "n_indent", "n_cache_reuse", "t_max_predict_ms"),
                *("t_max_prompt_ms", "samplers", "response_fields"),
                *("timings_per_token", "return_progress", "parse_tool_calls", "thinking_forced_open"),
                *("reasoning_in_content", "penalize_nl", "backend_sampling", "speculative.n_max"),
                *("speculative.n_min", "speculative.p_min"),
            )
        },
        **{name: Known((OLLAMA,)) for name in ("keep_alive", "options", "truncate", "shift")},
        **{name: Known((LM_STUDIO,)) for name in ("ttl", "draft_model")},
        **{
            name: Known((OPENROUTER,))
            for name in (
                *("provider", "models", "route", "transforms", "plugins", "usage", "session_id", "trace", "debug"),
                *("cache_control", "image_config"),
            )
        },
        "user_id": Known((DEEPSEEK,)),
        **{name: Known((TGI,)) for name in ("guideline", "tool_prompt", "do_sample")},
    }
)

_OLLAMA_OPTIONS: Mapping[str, Known] = MappingProxyType(  # of its runner
    {
        **_SAMPLERS,
        **{
            name: Known((OLLAMA,))
            for name in (
                *("penalize_newline", "num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa"),
                *("low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only"),
                "draft_num_predict",
            )
        },
    }
)

# by place: of the request's body, and of objects in it
KNOWN: Mapping[str, Mapping[str, Known]] = MappingProxyType(
    {
        "": _BODY,
        "options": _OLLAMA_OPTIONS,
        "parameters": MappingProxyType({name: _BODY[name] for name in ("typical_p", "watermark")}),
        "sampling_params": MappingProxyType(
            {"custom_params": Known((SGLANG,)), "stream_interval": Known((SGLANG,)), "min_keep": _SAMPLERS["min_keep"]}
        ),
    }
)


def split(place: str | None, body: Fields, own: Collection[str]) -> Split:
    """The fields of a body or of an object in it. place: one of KNOWN, or None; own: the names that the route has.

    Raises PydanticCustomError for a refused value, and for two names of one field with different values.
    """
    found = Split({name: body[name] for name in body if name in own}, {}, [], [])
    overriding: dict[str, Any] = {}
    table = {} if place is None else KNOWN[place]
    for name in body:
        value = body[name]
        if name in own or value is None:
            continue
        known = table.get(name)
        if known is None or (known.own and known.own not in own):
            found.unknown.append(name)
        elif known.own:
            _set(found, known.own, value, name)
        elif known.accepted is not None:
            if not any(is_same(value, one) for one in known.accepted):
                neutral = " or ".join(map(json.dumps, known.accepted))
                send = f"leave it out, or send {neutral}" if neutral else "leave it out"
                hint = f"{known.instead}; {send}" if known.instead else send
                raise PydanticCustomError(
                    "not_supported", "{name} is not supported yet: {hint}", {"name": name, "hint": hint}
                )
        elif (meant := known.meaning(value, own) if known.meaning else None) is _WRONG:
            about = _about(known)
            raise PydanticCustomError("known_value", "{name} is not as {about}", {"name": name, "about": about})
        elif meant is None:
            found.ignored.append(f"{place}.{name}" if place else name)
        elif known.overrides:
            overriding |= meant
        else:
            for ours, theirs in meant.items():
                _set(found, ours, theirs, name)
    found.own.update(overriding)
    return found


def _about(known: Known) -> str:
    """The first sentence about the meaning of a field."""
    return (known.meaning.__doc__ or "").rstrip(".") if known.meaning else ""


def _set(found: Split, name: str, value: object, given: str) -> None:
    """Set an own field for another name of it."""
    if found.own.get(name) is not None and found.own[name] != value:
        own = found.renamed.get(name, name)
        raise PydanticCustomError(
            "two_names", "{name} and {own} say the same; give one of them", {"name": given, "own": own}
        )
    found.own[name] = value
    found.renamed[name] = given


def is_same(value: object, neutral: JsonValue) -> bool:
    """Whether two values are equal, with 0 and false distinct."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def described(place: str | None, own: Collection[str]) -> Iterator[tuple[str, str, tuple[JsonValue, ...] | None]]:
    """The fields of the table that a body with these own fields takes: name, description, accepted values."""
    for name, known in ({} if place is None else KNOWN[place]).items():
        if name in own or (known.own and known.own not in own):
            continue
        of = f"Of {', '.join(known.servers)}"
        if known.own:
            yield name, f"{of}: another name for {known.own}.", None
        elif known.accepted is not None:
            values = ", ".join(["null", *map(json.dumps, known.accepted)])
            yield name, f"{of}: not supported yet; accepted with a value that has no effect ({values}).", known.accepted
        elif known.meaning is not None:
            yield name, f"{of}: taken as the fields that say the same here.", None
        else:
            yield name, f"{of}: accepted without effect.", None
