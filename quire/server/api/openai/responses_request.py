"""From the body of /v1/responses to items, a chat request, and the fields of the response that begins."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import Request

from quire.chat.tools import Toolbox, toolbox
from quire.engine.inputs import template_variables
from quire.errors import ContextLengthExceeded
from quire.params import SamplingParams
from quire.server.adapters import ServedModel
from quire.server.api.conversation import RENDERING_FIELDS, ChatRequest, Rendering, reasoning_variables
from quire.server.api.openai.responses_output import item_id, now
from quire.server.api.openai.responses_schema import Item, ResponseBody, chat_messages
from quire.server.api.openai.responses_tools import ResponseTools
from quire.server.middleware.auth import caller_of
from quire.server.service import Service


def items_of(body: ResponseBody, response_id: str) -> list[dict[str, Any]]:
    """The items of a body, with ids, and with content as parts."""
    items: list[dict[str, Any]]
    if isinstance(body.input, str):
        items = [{"type": "message", "role": "user", "content": body.input}]
    else:
        items = [item.plain() for item in body.input]
    for number, item in enumerate(items):
        if item["type"] == "message" and isinstance(item.get("content"), str):
            kind = "output_text" if item.get("role") == "assistant" else "input_text"
            item["content"] = [{"type": kind, "text": item["content"]}]
        item.setdefault("id", item_id(item["type"], response_id, number))
        item.setdefault("status", "completed")
    return items


def chat_request(
    service: Service,
    body: ResponseBody,
    model: ServedModel,
    tools: ResponseTools,
    input: Sequence[Item],
    request: Request,
) -> ChatRequest:
    """The conversation of a body. tools: its tools. input: its items, with those before. Raises RequestError."""
    offered = toolbox(tools.functions, tools.choice(body.tool_choice), body.parallel_tool_calls)
    return ChatRequest(
        model=model,
        messages=chat_messages(input, body.instructions, tools),
        params=body.sampling_params(service.sampling_defaults),
        rendering=_rendering(body, offered),
        toolbox=offered,
        thinking_budget=body.thinking_token_budget,
        namespace=caller_of(request).namespace(body.cache_salt),
        scheduling_params=body.scheduling_params(service.options),
        repeats=True,
    )


def _rendering(body: ResponseBody, offered: Toolbox | None) -> Rendering:
    """The rendering that a body requests. Raises RequestError."""
    shown = () if offered is None or offered.choice.mode == "none" else offered.tools
    reasoning = reasoning_variables(None if body.reasoning is None else body.reasoning.effort)
    return Rendering(
        tools=[tool.raw for tool in shown] or None,
        variables=reasoning | template_variables(body.chat_template_kwargs, RENDERING_FIELDS),
    )


def truncated(service: Service, chat: ChatRequest) -> ChatRequest:
    """`chat` without the oldest turns that do not fit into the context. Messages of the system at the begin stay.

    What is left begins with a message of the user. The last turn stays, whether it fits or not.
    """
    first = next((i for i, message in enumerate(chat.messages) if message["role"] != "system"), 0)
    turns = [i for i, message in enumerate(chat.messages) if i > first and message["role"] == "user"]
    cuts = [first, *turns]

    def shortened(cut: int) -> ChatRequest:
        return replace(chat, messages=[*chat.messages[:first], *chat.messages[cut:]])

    def fits(cut: int) -> bool:
        messages = shortened(cut).messages
        try:
            chat.rendering.check_size(messages, service)
        except ContextLengthExceeded:
            return False
        return len(chat.rendering.tokenize(messages, service.tokenizer).ids) < service.max_model_len

    low, high = 0, len(cuts) - 1
    while low < high:  # the number of tokens falls with each turn that is dropped
        middle = (low + high) // 2
        if fits(cuts[middle]):
            high = middle
        else:
            low = middle + 1
    return shortened(cuts[low])


def response_fields(id: str, model: ServedModel, body: ResponseBody, params: SamplingParams) -> dict[str, Any]:
    """The fields of a response that begins."""
    format = None if body.text is None else body.text.format
    return {
        "id": id,
        "object": "response",
        "created_at": now(),
        "completed_at": None,
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": model.name,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": body.summary},
        "store": body.store is not False,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"} if format is None else format.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": None,
    }
