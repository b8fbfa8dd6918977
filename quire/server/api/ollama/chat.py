"""/api/chat and /api/generate, with Ollama's format."""

import json
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import UTC, datetime

import msgspec
from fastapi import APIRouter, Request, Response

from quire.chat.formats import ChatFormat
from quire.chat.output import OutputFormat
from quire.chat.parts import CallArguments, CallBegin, CallEnd, Content, Part, Reasoning
from quire.chat.tools import toolbox
from quire.engine.inputs import Generation
from quire.engine.outputs import LogprobRow
from quire.errors import RequestError
from quire.params import SamplingParams
from quire.server.adapters import ServedModel
from quire.server.api.conversation import ChatRequest, MessageReader, Rendering, start_conversation
from quire.server.api.limits import bounded_answer, num_prompt_tokens
from quire.server.api.ollama.schema import (
    ENGINE_NAMES,
    GenerationBody,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaMessage,
)
from quire.server.api.openai.logprobs import LogprobFormat
from quire.server.errors import renamed_fields
from quire.server.middleware.auth import caller_of
from quire.server.reply import Reply, check_end, respond
from quire.server.service import Service
from quire.server.sse import LINES, TimeLimit, line

_NO_MARKUP = OutputFormat(ChatFormat(None, None, "a raw prompt"), None, None, begun=False, may_reason=False)


def timestamp() -> str:
    """The current time in Ollama's format."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def generation_routes(service: Service) -> APIRouter:
    """The routes /api/chat and /api/generate."""
    router = APIRouter(tags=["Ollama"], route_class=service.request_bodies.route_class())

    @router.post("/api/chat", response_model=None)
    async def chat(body: OllamaChatBody, request: Request) -> Response:
        """Generate the next message of a conversation."""
        model = await service.served_model(request, body.model)
        if not body.messages:
            return _loaded(service, model, body, _chat_fields)
        limit, id = TimeLimit(body.timeout), service.request_ids.make("chat", request)
        with renamed_fields({**ENGINE_NAMES, "prompt": "messages"}):
            answer, reply = await limit.run(_start_chat(service, body, model, request, id))
        return await respond(request, answer, reply, limit, stream=body.stream is not False, stream_format=LINES)

    @router.post("/api/generate", response_model=None)
    async def generate(body: OllamaGenerateBody, request: Request) -> Response:
        """Answer a prompt."""
        model = await service.served_model(request, body.model)
        if not body.prompt:
            return _loaded(service, model, body, _generate_fields)
        limit, id = TimeLimit(body.timeout), service.request_ids.make("generate", request)
        with renamed_fields({**ENGINE_NAMES, "messages": "prompt"}):
            answer, reply = await limit.run(_start_generate(service, body, model, request, id))
        return await respond(request, answer, reply, limit, stream=body.stream is not False, stream_format=LINES)

    return router


async def _start_chat(
    service: Service, body: OllamaChatBody, model: ServedModel, request: Request, id: str
) -> tuple["OllamaAnswer", Reply]:
    unknown = sum(len(message.model_extra or ()) for message in body.messages or ())
    service.metrics.count_unknown_fields("messages", unknown)
    rendering = Rendering(tools=body.tools, variables=body.variables)
    chat = await service.prepare(
        request, lambda: _chat_request(service, body, model, request, chat_messages(body.messages or ()), rendering)
    )
    reader, reply = await start_conversation(service, request, id, chat)
    return OllamaAnswer(id, service, model, chat.params, reader, _chat_fields), reply


async def _start_generate(
    service: Service, body: OllamaGenerateBody, model: ServedModel, request: Request, id: str
) -> tuple["OllamaAnswer", Reply]:
    if body.raw or not service.tokenizer.has_chat_template:
        if body.system:
            raise RequestError("system needs the chat template; leave raw out, or write it into the prompt", "system")
        params = body.sampling_params(service.sampling_defaults)
        reader, reply = await _continue_text(service, body, model, request, id, params)
    else:
        messages: list[dict[str, object]] = [{"role": "user", "content": body.prompt}]
        if body.system:
            messages.insert(0, {"role": "system", "content": body.system})
        rendering = Rendering(variables=body.variables)
        chat = await service.prepare(request, lambda: _chat_request(service, body, model, request, messages, rendering))
        params = chat.params
        reader, reply = await start_conversation(service, request, id, chat)
    return OllamaAnswer(id, service, model, params, reader, _generate_fields), reply


def _chat_request(
    service: Service,
    body: GenerationBody,
    model: ServedModel,
    request: Request,
    messages: Sequence[Mapping[str, object]],
    rendering: Rendering,
) -> ChatRequest:
    if body.think and service.chat_format.reasoning is None:
        raise RequestError("this model has no reasoning that is known; leave think out", "think")
    return ChatRequest(
        model=model,
        messages=messages,
        params=body.sampling_params(service.sampling_defaults),
        rendering=rendering,
        toolbox=toolbox(rendering.tools),
        namespace=caller_of(request).namespace(body.cache_salt),
        scheduling_params=body.scheduling_params(service.options),
        whole=body.stream is False,
    )


async def _continue_text(
    service: Service, body: OllamaGenerateBody, model: ServedModel, request: Request, id: str, params: SamplingParams
) -> tuple[MessageReader, Reply]:
    """Queue a prompt as it is, whose output has no markup."""
    caller = caller_of(request)
    asked: Sequence[Generation] = await service.tokenize(caller.tenant, [body.prompt or ""], [params])
    whole = body.stream is False
    if whole:
        asked = bounded_answer(asked, service.max_model_len)
    namespace, scheduling_params = caller.namespace(body.cache_salt), body.scheduling_params(service.options)
    with caller.quota.spending(num_prompt_tokens(asked)):
        about = (id, asked, namespace)
        reply = await service.start(*about, scheduling_params=scheduling_params, adapters=model.adapter, whole=whole)
    return MessageReader(_NO_MARKUP), reply


def chat_messages(messages: Sequence[OllamaMessage]) -> list[dict[str, object]]:
    """The messages with OpenAI's names. Calls get the ids that Ollama's messages may lack."""
    ids = _CallIds()
    return [_chat_message(message, ids) for message in messages]


class _CallIds:
    """Ids of the calls of a conversation. The same conversation has the same ids, so that its KV is found.

    The work is linear in the number of calls and results.
    """

    def __init__(self) -> None:
        self._num_calls = 0
        self._open: set[str] = set()  # calls without a result
        self._queues: defaultdict[str | None, deque[str]] = defaultdict(deque)  # by name, and of all calls: None

    def call(self, given: object, name: str) -> str:
        """The id of the next call. Nine digits, because some templates accept no other length."""
        self._num_calls += 1
        id = given if isinstance(given, str) and given else f"{self._num_calls:09}"
        self._open.add(id)
        self._queues[name].append(id)
        self._queues[None].append(id)
        return id

    def result(self, given: str | None, name: str | None) -> str | None:
        """The id of the call that a result belongs to: the first open one of this name, or the first."""
        found = given or self._first(name) or self._first(None)
        self._open.discard(found or "")
        return found

    def _first(self, name: str | None) -> str | None:
        queue = self._queues[name]
        while queue and queue[0] not in self._open:
            queue.popleft()
        return queue[0] if queue else None


def _chat_message(message: OllamaMessage, ids: _CallIds) -> dict[str, object]:
    plain = message.model_dump(exclude_unset=True, exclude={"tool_calls", "thinking", "tool_call_id", "images"})
    if message.role != "assistant":
        plain["content"] = message.content or ""
    if message.role == "tool":
        plain["tool_call_id"] = ids.result(message.tool_call_id, message.tool_name)
    if message.thinking:
        plain["reasoning_content"] = message.thinking
    if message.tool_calls:
        plain["tool_calls"] = [_chat_call(call, ids) for call in message.tool_calls]
    return plain


def _chat_call(call: Mapping[str, object], ids: _CallIds) -> dict[str, object]:
    function = call.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise RequestError("a tool call needs a function with name and arguments", "messages")
    arguments = function.get("arguments") or {}
    return {
        "id": ids.call(call.get("id"), name),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


Calls = Sequence[dict[str, object]]
# The fields of a response with the message, or with what a step adds to it: from content, thinking and whole calls.
MessageFields = Callable[[str, str, Calls], dict[str, object]]


def _chat_fields(content: str, thinking: str, calls: Calls) -> dict[str, object]:
    thought = {"thinking": thinking} if thinking else {}
    return {"message": {"role": "assistant", "content": content, **thought, **({"tool_calls": calls} if calls else {})}}


def _generate_fields(content: str, thinking: str, _calls: Calls) -> dict[str, object]:
    return {"response": content, **({"thinking": thinking} if thinking else {})}


def _loaded(service: Service, model: ServedModel, body: GenerationBody, fields: MessageFields) -> Response:
    """The answer to a request without a prompt, with which Ollama's clients load or unload a model.

    Raises RequestError for fields that a request with a prompt may not have.
    """
    with renamed_fields(ENGINE_NAMES):
        body.sampling_params(service.sampling_defaults)
        body.scheduling_params(service.options)
    reason = "unload" if body.keep_alive in (0, "0", "0s") else "load"
    head = {"model": model.name, "created_at": timestamp()}
    content = {**head, **fields("", "", ()), "done": True, "done_reason": reason}
    return Response(msgspec.json.encode(content), media_type="application/json")


class WholeCalls:
    """Collects the tool calls of one message, as Ollama's clients expect a call with all its arguments at once.

    A call that was cut is left out, because its arguments are no JSON object.
    """

    def __init__(self, new_call_id: Callable[[int, str], str]) -> None:
        self._new_call_id = new_call_id
        self._name = ""  # of the last call
        self._pieces: list[str] = []

    def push(self, parts: Sequence[Part]) -> list[dict[str, object]]:
        """The calls that further parts complete."""
        calls: list[dict[str, object]] = []
        for part in parts:
            match part:
                case CallBegin(_, name):
                    self._name, self._pieces = name, []
                case CallArguments(_, text):
                    self._pieces.append(text)
                case CallEnd(index):
                    calls += self._complete(index)
        return calls

    def _complete(self, index: int) -> list[dict[str, object]]:
        try:
            arguments = json.loads("".join(self._pieces))
        except (ValueError, RecursionError):
            return []
        function = {"index": index, "name": self._name, "arguments": arguments}
        return [{"id": self._new_call_id(index, self._name), "function": function}]


class OllamaAnswer:
    """Ollama's objects for one request. fields: makes those with the message."""

    def __init__(
        self,
        id: str,
        service: Service,
        model: ServedModel,
        params: SamplingParams,
        reader: MessageReader,
        fields: MessageFields,
    ) -> None:
        self.id = id
        self._model_name = model.name
        self._reader = reader
        self._fields = fields
        self._calls = WholeCalls(reader.new_call_id)
        self._logprobs = LogprobFormat(params, service.tokenizer)

    def full_response(self, reply: Reply) -> dict[str, object]:
        """The body of the response. Raises as `events`."""
        (choice,) = self._reader.choices(reply)
        end = _end(reply, choice.finish_reason, choice.output.stop_reason)
        fields = self._content(choice.parts, choice.output.logprobs)
        return {**self._head(), **(fields or self._fields("", "", ())), **end}

    async def events(self, reply: Reply) -> AsyncIterator[bytes]:
        """The lines of a stream. Raises DeadlineMissed or RequestError if the message has no regular end."""
        (transcript,) = reply.transcripts
        transcript.drop_logprobs()
        async for deltas in self._reader.deltas(reply):
            lines = []
            for _, parts, delta, finish_reason in deltas:
                fields = self._content(parts, delta.logprobs)
                if fields:
                    lines.append(line({**self._head(), **fields, "done": False}))
                if finish_reason is not None:
                    end = _end(reply, finish_reason, delta.stop_reason)
                    lines.append(line({**self._head(), **self._fields("", "", ()), **end}))
            yield b"".join(lines)

    def _head(self) -> dict[str, object]:
        return {"model": self._model_name, "created_at": timestamp()}

    def _content(self, parts: Sequence[Part], rows: Sequence[LogprobRow] | None) -> dict[str, object]:
        """The fields of further parts; empty if they add nothing, such as the beginning of a call."""
        content = "".join(part.text for part in parts if isinstance(part, Content))
        thinking = "".join(part.text for part in parts if isinstance(part, Reasoning))
        calls = self._calls.push(parts)
        logprobs = self._logprobs.chat(rows)
        if not (content or thinking or calls or logprobs):
            return {}
        return {
            **self._fields(content, thinking, calls),
            **({} if logprobs is None else {"logprobs": logprobs["content"]}),
        }


def _end(reply: Reply, finish_reason: str | None, stop_reason: str | int | None) -> dict[str, object]:
    """Why the output ended, and times in nanoseconds. Raises as `check_end`."""
    check_end(finish_reason, stop_reason)
    (transcript,) = reply.transcripts
    metrics = transcript.metrics
    ended = metrics.finished_time or time.monotonic()
    first = metrics.first_token_time or ended
    return {
        "done": True,
        "done_reason": "length" if finish_reason == "length" else "stop",
        "total_duration": _nanoseconds(ended - metrics.arrival_time),
        "load_duration": 0,
        "prompt_eval_count": len(transcript.prompt.ids),
        "prompt_eval_duration": _nanoseconds(first - metrics.arrival_time - (metrics.queue_seconds or 0)),
        "eval_count": sum(transcript.num_output_tokens),
        "eval_duration": _nanoseconds(ended - first),
    }


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 10**9))
