"""/v1/messages, with Anthropic's format."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec
from fastapi import APIRouter, Request, Response

from quire.chat.tools import toolbox
from quire.core.scheduling_params import SchedulingParams
from quire.engine.inputs import kept_for
from quire.params import SamplingParams
from quire.server.adapters import ServedModel
from quire.server.api.anthropic.content_blocks import ContentBlocks, whole_blocks
from quire.server.api.anthropic.schema import CountTokensBody, MessagesBody
from quire.server.api.anthropic.translation import (
    chat_messages,
    chat_tool_choice,
    chat_tools,
    left_out,
    num_unknown_fields,
    rendering_of,
)
from quire.server.api.conversation import ChatRequest, MessageDelta, MessageReader, start_conversation
from quire.server.errors import renamed_fields
from quire.server.middleware.auth import caller_of
from quire.server.model_names import CLAUDE
from quire.server.reply import Reply, check_end, respond
from quire.server.service import Service
from quire.server.sse import NAMED_EVENTS, TimeLimit, named_event

PING_SECONDS = 10.0  # between pings, until the first output: proxies close connections that are silent for long
_PING = named_event({"type": "ping"})
_ENGINE_NAMES = {
    **{"prompt": "messages", "stop": "stop_sequences", "json": "output_config", "structured_outputs": "output_config"},
    **{"thinking_token_budget": "thinking", "continue_final_message": "messages"},
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def message_routes(service: Service) -> APIRouter:
    """The routes /v1/messages and /v1/messages/count_tokens."""
    router = APIRouter(tags=["Anthropic"], route_class=service.request_bodies.route_class())

    @router.post("/v1/messages", response_model=None)
    async def messages(body: MessagesBody, request: Request) -> Response:
        """Generate the next message of a conversation."""
        limit, id = TimeLimit(body.timeout), service.request_ids.make("msg", request)
        answer, reply = await limit.run(_start(service, body, request, id))
        return await respond(request, answer, reply, limit, stream=bool(body.stream), stream_format=NAMED_EVENTS)

    @router.post("/v1/messages/count_tokens", response_model=None)
    async def count_tokens(body: CountTokensBody, request: Request) -> Response:
        """Count the prompt's tokens of a conversation, without an answer."""
        await service.served_model(request, body.model, builtin=(CLAUDE,))
        service.ignore(request, "tools", left_out(body.tools))
        number = await service.thread_pool.run(caller_of(request).tenant, lambda: _num_tokens(service, body))
        return Response(msgspec.json.encode({"input_tokens": number}), media_type="application/json")

    return router


def _num_tokens(service: Service, body: CountTokensBody) -> int:
    tools, messages = chat_tools(body.tools), chat_messages(body)
    toolbox(tools, chat_tool_choice(body))  # checks them
    rendering = rendering_of(body, tools)
    with renamed_fields(_ENGINE_NAMES):
        rendering.check_size(messages, service)
        return len(rendering.tokenize(messages, service.tokenizer).ids)


async def _start(service: Service, body: MessagesBody, request: Request, id: str) -> tuple["MessagesAnswer", Reply]:
    model = await service.served_model(request, body.model, builtin=(CLAUDE,))
    with renamed_fields(_ENGINE_NAMES):
        chat = await service.prepare(request, lambda: _chat_request(service, body, model, request))
        service.ignore(request, "tools", left_out(body.tools))
        service.metrics.count_unknown_fields("messages", num_unknown_fields(body))
        reader, reply = await start_conversation(service, request, id, chat)
        return MessagesAnswer(id, model.name, body, reader), reply


def _chat_request(service: Service, body: MessagesBody, model: ServedModel, request: Request) -> ChatRequest:
    tools, choice = chat_tools(body.tools), body.tool_choice
    is_parallel = None if choice is None else not choice.disable_parallel_tool_use
    return ChatRequest(
        model=model,
        messages=chat_messages(body),
        params=_sampling_params(service, body),
        rendering=rendering_of(body, tools),
        toolbox=toolbox(tools, chat_tool_choice(body), is_parallel),
        thinking_budget=_thinking_budget(service, body),
        namespace=caller_of(request).namespace(body.cache_salt),
        scheduling_params=_scheduling_params(service, body),
        whole=not body.stream,
    )


def _thinking_budget(service: Service, body: MessagesBody) -> int | None:
    """None if the model has no reasoning that could exceed it: clients send a budget to any model."""
    known = service.chat_format.reasoning is not None
    return body.thinking.budget_tokens if body.thinking is not None and known else None


def _sampling_params(service: Service, body: MessagesBody) -> SamplingParams:
    given = {name: getattr(body, name) for name in ("max_tokens", "temperature", "top_k", "top_p")}
    chosen = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(
        **{**service.sampling_defaults, **chosen, "stop": body.stop_sequences, "structured_outputs": body.constraint}
    )


def _scheduling_params(service: Service, body: MessagesBody) -> SchedulingParams:
    """Those of the body. Without `retention`, cache_control sets it."""
    found, seconds = body.scheduling_params(service.options), body.cache_seconds
    if body.retention is None and seconds:
        return msgspec.structs.replace(found, retention=kept_for(seconds, service.options))
    return found


class MessagesAnswer:
    """Anthropic's message for one request."""

    def __init__(self, id: str, model_name: str, body: MessagesBody, reader: MessageReader) -> None:
        self.id = id
        self._head = {"id": id, "type": "message", "role": "assistant", "model": model_name}
        self._reader = reader
        self._is_cached = body.cache_seconds > 0
        with_thinking = body.thinking is None or body.thinking.display != "omitted"
        self._blocks = ContentBlocks(reader.new_call_id, with_thinking=with_thinking)

    def full_response(self, reply: Reply) -> dict[str, object]:
        """The body of the response. Raises as `events`."""
        (choice,) = self._reader.choices(reply)
        stop = _stop(choice.finish_reason, choice.output.stop_reason)
        content = whole_blocks(choice.parts, self._blocks)
        return {**self._head, "content": content, **stop, "usage": self._usage(reply)}

    async def events(self, reply: Reply) -> AsyncIterator[bytes]:
        """The events of a stream. Raises DeadlineMissed or RequestError if the message has no regular end."""
        nothing: dict[str, object] = {"content": [], "stop_reason": None, "stop_sequence": None}
        yield named_event({"type": "message_start", "message": {**self._head, **nothing, "usage": self._usage(reply)}})
        yield _PING
        deltas = self._reader.deltas(reply)
        first = asyncio.ensure_future(anext(deltas))
        try:
            while not (await asyncio.wait((first,), timeout=PING_SECONDS))[0]:
                yield _PING
            yield self._events(first.result(), reply)
        finally:
            first.cancel()
        async for more in deltas:
            yield self._events(more, reply)

    def _events(self, deltas: Sequence[MessageDelta], reply: Reply) -> bytes:
        events: list[dict[str, object]] = []
        for _, parts, delta, finish_reason in deltas:
            events += self._blocks.events(parts)
            if finish_reason is not None:
                events += self._blocks.close()
                stop, usage = _stop(finish_reason, delta.stop_reason), self._usage(reply)
                events += [{"type": "message_delta", "delta": stop, "usage": usage}, {"type": "message_stop"}]
        return b"".join(map(named_event, events))

    def _usage(self, reply: Reply) -> dict[str, object]:
        """The three kinds of input tokens add up to the prompt's. Before the first output none is known as cached."""
        (transcript,) = reply.transcripts
        num_cached = transcript.num_cached_tokens
        num_computed = len(transcript.prompt.ids) - num_cached
        reasoning = reply.num_reasoning_tokens
        return {
            "input_tokens": 0 if self._is_cached else num_computed,
            "cache_creation_input_tokens": num_computed if self._is_cached else 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": sum(transcript.num_output_tokens),
            **({} if reasoning is None else {"output_tokens_details": {"thinking_tokens": reasoning}}),
        }


def _stop(finish_reason: str | None, stop_reason: str | int | None) -> Mapping[str, object]:
    """Why the message ended. Raises as `check_end`."""
    check_end(finish_reason, stop_reason)
    if finish_reason == "stop" and isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    return {"stop_reason": _STOP_REASONS[str(finish_reason)], "stop_sequence": None}
