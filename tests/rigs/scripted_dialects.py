"""Each dialect's requests to a scripted model, and its answers, whole and streamed, in one form."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice of an answer. blocks: texts of its content. calls: name, arguments, and the status if there is one.

    end: why it ended, in the dialect's words. tokens: ids; None if the dialect has none. logprobs: texts of the tokens
    that have one; None without logprobs.
    """

    reasoning: str
    blocks: tuple[str, ...]
    calls: tuple[tuple[object, ...], ...]
    end: object
    tokens: tuple[int, ...] | None = None
    logprobs: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Answers:
    """The choices of a response. num_tokens, num_reasoning: as its usage has them."""

    choices: tuple[Answer, ...]
    num_tokens: int
    num_reasoning: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a dialect is spoken. body: of a request without options, from the script's name and its prompt.

    limit: the place of the field for max_tokens. whole, streamed: read a body, or the text of a stream.
    """

    path: str
    body: Callable[[str, str], Body]
    limit: tuple[str, ...]
    whole: Callable[[Any], Answers]
    streamed: Callable[[str], Answers]
    stream_fields: Mapping[str, object]


def merged(*bodies: Mapping[str, Any]) -> Body:
    """The bodies as one; objects of one name are merged."""
    found: Body = {}
    for body in bodies:
        for name, value in body.items():
            is_object = isinstance(value, dict) and isinstance(found.get(name), dict)
            found[name] = merged(found[name], value) if is_object else value
    return found


def _chat_message(name: str, _prompt: str) -> Body:
    return {"messages": [{"role": "user", "content": name}]}


def _data(stream: str) -> list[Any]:
    """The objects of server-sent events."""
    lines = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def _parsed(text: str) -> object:
    """Arguments as an object; what is cut is an empty one."""
    try:
        return json.loads(text)
    except ValueError:
        return {}


def _texts(entries: Sequence[Mapping[str, Any]] | None) -> tuple[str, ...] | None:
    return None if entries is None else tuple(entry["token"] for entry in entries)


# OpenAI's chat


def _chat_choice(message: Mapping[str, Any], choice: Mapping[str, Any]) -> Answer:
    content = message.get("content") or ""
    logprobs = choice["logprobs"]
    return Answer(
        message.get("reasoning") or "",
        (content,) if content else (),
        tuple((call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()),
        (choice["finish_reason"], choice["stop_reason"]),
        tuple(choice["token_ids"]),
        _texts(logprobs["content"] if logprobs else None),
    )


def _chat_whole(body: Any) -> Answers:
    choices = tuple(_chat_choice(choice["message"], choice) for choice in body["choices"])
    return Answers(choices, *_chat_usage(body["usage"]))


def _chat_usage(usage: Mapping[str, Any]) -> tuple[int, int]:
    return usage["completion_tokens"], usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)


def _chat_streamed(stream: str) -> Answers:
    chunks = _data(stream)
    whole: dict[int, Body] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        empty = {"content": "", "reasoning": "", "tool_calls": [], "token_ids": [], "logprobs": None, "ended": False}
        found = whole.setdefault(choice["index"], empty)
        assert not found["ended"], "a chunk behind the finish reason"
        delta = choice["delta"]
        found["content"] += delta.get("content") or ""
        found["reasoning"] += delta.get("reasoning") or ""
        found["token_ids"] += choice["token_ids"]
        for call in delta.get("tool_calls") or ():
            if call["index"] == len(found["tool_calls"]):
                found["tool_calls"].append({"function": {"name": call["function"]["name"], "arguments": ""}})
            found["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        if choice["logprobs"]:
            before = (found["logprobs"] or {"content": []})["content"]
            found["logprobs"] = {"content": before + choice["logprobs"]["content"]}
        found["ended"] = choice["finish_reason"] is not None
        found |= {"finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}
    choices = tuple(_chat_choice(whole[index], whole[index]) for index in sorted(whole))
    return Answers(choices, *_chat_usage(chunks[-1]["usage"]))


# OpenAI's completions


def _text_choice(choice: Mapping[str, Any]) -> Answer:
    logprobs, text = choice["logprobs"], choice["text"]
    return Answer(
        "",
        (text,) if text else (),
        (),
        (choice["finish_reason"], choice["stop_reason"]),
        tuple(choice["token_ids"]),
        tuple(logprobs["tokens"]) if logprobs else None,
    )


def _completions_whole(body: Any) -> Answers:
    return Answers(tuple(map(_text_choice, body["choices"])), body["usage"]["completion_tokens"])


def _completions_streamed(stream: str) -> Answers:
    chunks = _data(stream)
    whole: dict[int, Body] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        found = whole.setdefault(choice["index"], {"text": "", "token_ids": [], "logprobs": None})
        found["text"] += choice["text"]
        found["token_ids"] += choice["token_ids"]
        if choice["logprobs"]:
            before = (found["logprobs"] or {"tokens": []})["tokens"]
            found["logprobs"] = {"tokens": before + choice["logprobs"]["tokens"]}
        found |= {"finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}
    choices = tuple(_text_choice(whole[index]) for index in sorted(whole))
    return Answers(choices, chunks[-1]["usage"]["completion_tokens"])


# OpenAI's responses


def _responses_whole(body: Any) -> Answers:
    """The answer of a response. Logprobs are without those of white space, which is dropped beside markup."""
    items: dict[str, list[Any]] = {"reasoning": [], "message": [], "function_call": []}
    for item in body["output"]:
        items[item["type"]].append(item)
    parts = [part for item in items["message"] for part in item["content"]]
    answer = Answer(
        "".join(part["text"] for item in items["reasoning"] for part in item["content"]),
        tuple(part["text"] for part in parts if part["text"]),
        tuple((call["name"], call["arguments"], call["status"]) for call in items["function_call"]),
        (body["status"], (body["incomplete_details"] or {}).get("reason")),
        None,
        _texts([entry for part in parts for entry in part["logprobs"] if entry["token"].strip()]),
    )
    usage = body["usage"]
    return Answers((answer,), usage["output_tokens"], usage["output_tokens_details"]["reasoning_tokens"])


def _responses_streamed(stream: str) -> Answers:
    """The answer that the deltas give together. The last event has the same one."""
    events = _data(stream)
    texts: dict[int, str] = {}
    logprobs: dict[int, list[object]] = {}
    items: dict[int, Any] = {}
    for event in events:
        place = event.get("output_index")
        if event["type"].endswith(".delta"):
            texts[place] = texts.get(place, "") + event["delta"]
            logprobs.setdefault(place, []).extend(event.get("logprobs", ()))
        elif event["type"] == "response.output_item.done":
            items[place] = event["item"]
    whole = events[-1]["response"]
    assert [items[place] for place in sorted(items)] == whole["output"], "the items are those of the last event"
    for place, item in items.items():
        parts = item.get("content") or [item]
        name = "arguments" if item["type"] == "function_call" else "text"
        assert parts[0][name] == texts.get(place, ""), "the deltas are the text of the item"
        if item["type"] == "message":
            rest = parts[0]["logprobs"][len(logprobs.get(place, [])) :]
            assert [*logprobs.get(place, []), *rest] == parts[0]["logprobs"], "the deltas have the item's logprobs"
    return _responses_whole(whole)


# Anthropic's messages


def _messages_whole(body: Any) -> Answers:
    blocks = body["content"]
    answer = Answer(
        "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        tuple(block["text"] for block in blocks if block["type"] == "text"),
        tuple((block["name"], json.dumps(block["input"])) for block in blocks if block["type"] == "tool_use"),
        (body["stop_reason"], body["stop_sequence"]),
    )
    usage = body["usage"]
    return Answers((answer,), usage["output_tokens"], usage.get("output_tokens_details", {}).get("thinking_tokens", 0))


def _messages_streamed(stream: str) -> Answers:
    blocks: list[Any] = []
    pieces: list[str] = []
    end: Body = {}
    for event in _data(stream):
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"])
                pieces = []
            case "content_block_delta" if event["delta"]["type"] != "signature_delta":
                pieces.append(next(value for name, value in event["delta"].items() if name != "type"))
            case "content_block_stop":
                text, kind = "".join(pieces), blocks[-1]["type"]
                blocks[-1] |= {"input": _parsed(text)} if kind == "tool_use" else {kind: text}
            case "message_delta":
                end = {**event["delta"], "usage": event["usage"]}
    return _messages_whole({"content": blocks, **end})


# Ollama


def _ollama_whole(body: Any) -> Answers:
    return _ollama_answer([body])


def _ollama_streamed(stream: str) -> Answers:
    return _ollama_answer([json.loads(line) for line in stream.splitlines()])


def _ollama_answer(lines: Sequence[Any]) -> Answers:
    messages = [line.get("message", line) for line in lines]
    content = "".join(message.get("content", message.get("response", "")) for message in messages)
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    rows = [line["logprobs"] for line in lines if "logprobs" in line]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    answer = Answer(
        "".join(message.get("thinking", "") for message in messages),
        (content,) if content else (),
        tuple((call["name"], json.dumps(call["arguments"])) for call in calls),
        lines[-1]["done_reason"],
        None,
        _texts([entry for row in rows for entry in row]) if rows else None,
    )
    return Answers((answer,), lines[-1]["eval_count"])


# SGLang


def _generate_choice(one: Any) -> Answer:
    about, text = one["meta_info"], one["text"]
    entries = about.get("output_token_logprobs")
    return Answer(
        "",
        (text,) if text else (),
        tuple((call["name"], call["arguments"]) for call in about.get("tool_calls", ())),
        about["finish_reason"],
        tuple(one["output_ids"]),
        None if entries is None else tuple(entry[2] for entry in entries),
    )


def _generate_whole(body: Any) -> Answers:
    found = body if isinstance(body, list) else [body]
    return Answers(tuple(map(_generate_choice, found)), sum(one["meta_info"]["completion_tokens"] for one in found))


def _generate_streamed(stream: str) -> Answers:
    newest: dict[int, Any] = {}
    for one in _data(stream):
        before = newest.get(one.get("index", 0), {"text": ""})
        assert one["text"].startswith(before["text"]), "text is not taken back"
        newest[one.get("index", 0)] = one
    return _generate_whole([newest[index] for index in sorted(newest)])


_COUNTED = {"stream_options": {"include_usage": True}}
_IDS = {"return_token_ids": True, "temperature": 0}
DIALECTS: Mapping[str, Dialect] = {
    "chat": Dialect(
        "/v1/chat/completions",
        lambda name, prompt: {**_chat_message(name, prompt), **_IDS},
        ("max_completion_tokens",),
        _chat_whole,
        _chat_streamed,
        _COUNTED,
    ),
    "completions": Dialect(
        "/v1/completions",
        lambda name, prompt: {"prompt": prompt, **_IDS},
        ("max_tokens",),
        _completions_whole,
        _completions_streamed,
        _COUNTED,
    ),
    "responses": Dialect(
        "/v1/responses",
        lambda name, prompt: {"input": name, "temperature": 0, "store": False},
        ("max_output_tokens",),
        _responses_whole,
        _responses_streamed,
        {},
    ),
    "messages": Dialect(
        "/v1/messages",
        lambda name, prompt: {**_chat_message(name, prompt), "temperature": 0},
        ("max_tokens",),
        _messages_whole,
        _messages_streamed,
        {},
    ),
    "ollama-chat": Dialect(
        "/api/chat",
        lambda name, prompt: {**_chat_message(name, prompt), "options": {"temperature": 0}},
        ("options", "num_predict"),
        _ollama_whole,
        _ollama_streamed,
        {},
    ),
    "ollama-generate": Dialect(
        "/api/generate",
        lambda name, prompt: {"prompt": name, "options": {"temperature": 0}},
        ("options", "num_predict"),
        _ollama_whole,
        _ollama_streamed,
        {},
    ),
    "sglang": Dialect(
        "/generate",
        lambda name, prompt: {"text": prompt, "sampling_params": {"temperature": 0}},
        ("sampling_params", "max_new_tokens"),
        _generate_whole,
        _generate_streamed,
        {},
    ),
}
