"""The responses of /v1/responses while they are generated, and in the store."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from fastapi import Request
from msgspec import Raw
from starlette.exceptions import HTTPException
from starlette.types import Scope

from quire.chat.tools import Toolbox, toolbox
from quire.engine.inputs import template_variables
from quire.errors import ContextLengthExceeded, QuireError, RequestError
from quire.params import SamplingParams
from quire.server.api.conversation import (
    RENDERING_FIELDS,
    ChatRequest,
    MessageReader,
    Rendering,
    reasoning_variables,
    start_conversation,
)
from quire.server.api.openai.logprobs import LogprobFormat
from quire.server.api.openai.responses_output import (
    DELTA,
    Event,
    ResponseWriter,
    item_id,
    now,
    response_of,
    response_usage,
)
from quire.server.api.openai.responses_schema import (
    ENCRYPTED,
    Item,
    ResponseBody,
    chat_messages,
    chat_tool_choice,
    chat_tools,
)
from quire.server.errors import StoreFull, UnknownObject, describe, renamed_fields
from quire.server.middleware.auth import caller_of
from quire.server.middleware.drain import Drain
from quire.server.observability.request_record import record_error
from quire.server.reply import Reply, check_end
from quire.server.request_body import MANY, MAX_BODY
from quire.server.service import Service
from quire.server.sse import TimeLimit, event, padded
from quire.server.store import Store

log = logging.getLogger(__name__)

TTL = 30 * 86_400  # seconds for which a response is stored
CLOSE_SECONDS = 2.0  # for responses in the background to be stored as failed, once the engine is closed
MAX_REFERENCES = 1024  # responses that the item references of one request may be in
UNFINISHED_CALL = "unfinished_call"  # why a response is incomplete whose call a stop string cut
_INCOMPLETE = {"length": "max_output_tokens", "abort": "deadline"}  # by finish reason


class StoredResponse(msgspec.Struct):
    """A response in the store. input: the items that it continues. events: of a stream in the background."""

    response: Raw
    input: Raw
    events: list[Raw] | None = None


class _Output(msgspec.Struct):
    output: list[dict[str, Any]]
    status: str


class _Conversation(msgspec.Struct):
    """The items of a StoredResponse. Its input can be long, and is decoded only where it is needed."""

    response: _Output
    input: Raw


class _Items:
    """The items of a stored response by id. The work for all look-ups is linear in its size."""

    def __init__(self, conversation: _Conversation) -> None:
        self._items = {one["id"]: one for one in conversation.response.output}
        self._input: Raw | None = conversation.input  # None once its items are in `_items`

    def find(self, id: str) -> dict[str, Any] | None:
        """The item of this id. The input is decoded if the output has none."""
        if id not in self._items and self._input is not None:
            items, self._input = _decoded_items(self._input), None
            self._items = {one["id"]: one for one in reversed(items)} | self._items
        return self._items.get(id)


def _decoded_items(items: Raw) -> list[dict[str, Any]]:
    return msgspec.json.decode(items, type=list[dict[str, Any]])


def _encoded_items(items: Sequence[Item]) -> Raw:
    """The items as JSON. Raises UnicodeEncodeError for text that cannot be sent back, RequestError beyond MAX_BODY."""
    encoded = msgspec.json.encode(items)
    if len(encoded) > MAX_BODY:
        raise RequestError(
            f"the conversation has {len(encoded):,} bytes with its earlier items, more than {MAX_BODY:,}; begin "
            "another one",
            "input",
        )
    return Raw(encoded)


class _EventHead(msgspec.Struct):
    type: str


def encoded_event(one: Raw) -> bytes:
    """An event, kept as JSON, as it is sent."""
    return event(one, msgspec.json.decode(one, type=_EventHead).type)


class Generation:
    """One response while it is generated.

    input: the items that it continues, as JSON. store: where it is stored; None if it is not. with_padding: pad events
    that have text. with_cache: whether computed prompt tokens are cached.
    """

    def __init__(
        self,
        tenant: str,
        writer: ResponseWriter,
        input: Raw,
        conversation: tuple[MessageReader, Reply],
        limit: TimeLimit,
        *,
        store: Store | None,
        with_padding: bool,
        with_cache: bool,
    ) -> None:
        self.tenant = tenant
        self.writer = writer
        self.input = input
        self._reader, self.reply = conversation
        self._limit = limit
        self._store = store
        self._with_padding = with_padding
        self._with_cache = with_cache

    async def run(self) -> None:
        """Generate the whole response and store it. Raises as `steps`."""
        async for _ in self.steps():
            pass
        await self._save()

    async def stream(self, scope: Scope) -> AsyncIterator[bytes]:
        """The events as they are sent. The response is stored before the last one. After an error, that tells of it."""
        try:
            async for events in self.steps():
                yield b"".join(event(one, one["type"]) for one in events)
        except Exception as error:
            record_error(scope, self.fail(error))
        await self._save()
        last = self.writer.last_event()
        yield event(last, last["type"])

    async def steps(self) -> AsyncIterator[list[Event]]:
        """The events of each step. The last event is not among them: it is `writer.last_event()`, afterwards.

        Raises as `MessageReader.deltas`, TimedOut, and RequestError for an output that its constraint could not end.
        """
        yield self.writer.begin()
        reason = None
        async for deltas in self._limit.iterate(self._reader.deltas(self.reply)):
            events = []
            for message in deltas:
                _, parts, delta, finish_reason = message
                rows = self._reader.content_logprobs(message) if self.writer.has_logprobs else None
                events += self.writer.add(parts, rows)
                reason = finish_reason or reason
                if reason == "error":  # a constraint without a further token: the output is not what was asked for
                    check_end(reason, delta.stop_reason)
            yield [padded(one, one["type"]) if self._is_padded(one) else one for one in events]
        why = _INCOMPLETE.get(str(reason))
        yield self.writer.close(complete=why is None)
        if why is None and self.writer.has_cut_call:
            why = UNFINISHED_CALL
        self.writer.change(
            status="incomplete" if why else "completed",
            incomplete_details={"reason": why} if why else None,
            completed_at=None if why else now(),
            usage=response_usage(self.reply.usage(), with_cache=self._with_cache),
        )

    def fail(self, error: Exception) -> dict[str, object]:
        """End the response with the status failed. Returns the error object."""
        status, body = describe(error)
        shown: Mapping[str, object] = body["error"]  # type: ignore[assignment]  # an object
        code = "rate_limit_exceeded" if status == 429 else "invalid_prompt" if status < 500 else "server_error"
        about = {name: shown[name] for name in ("message", "param", "type")}
        self.writer.change(status="failed", error={"code": code, **about})
        return body

    def record(self, events: Sequence[Raw] | None = None) -> bytes:
        """The response as it is now, for the store."""
        return msgspec.json.encode({"response": self.writer.response, "input": self.input, "events": events})

    def _is_padded(self, one: Event) -> bool:
        return self._with_padding and one["type"].endswith(DELTA)

    async def _save(self) -> None:
        """Store the response. If there is no room, or no store, it says that it is not stored."""
        if self._store is None:
            return
        id, end = self.writer.response["id"], self._store.clock() + TTL
        try:
            await self._store.create(self.tenant, "response", id, self.record(), expires_at=end)
        except (QuireError, HTTPException) as error:
            log.warning("a response could not be stored: %s", error)
            self.writer.change(store=False)


class Running:
    """A response that is generated in the background. keep_events: whether its stream can be read, at any time."""

    def __init__(self, generation: Generation, *, keep_events: bool) -> None:
        self.keeps_events = keep_events
        self._generation = generation
        self._events: list[Raw] = []  # the i-th has the sequence number i
        self._changed = asyncio.Event()  # replaced with each change
        self.is_generated = False  # what is left is to store it
        self._has_ended = False
        self.task: asyncio.Task[None]

    @property
    def response(self) -> dict[str, Any]:
        """The response as it is now."""
        return self._generation.writer.response

    @property
    def input(self) -> Raw:
        """The items that the response continues."""
        return self._generation.input

    async def events(self, first: int = 0) -> AsyncIterator[bytes]:
        """The events from this sequence number on, as they are sent."""
        while True:
            changed, events = self._changed, self._events[first:]
            first += len(events)
            if events:
                yield b"".join(map(encoded_event, events))
            elif self._has_ended:
                return
            else:
                await changed.wait()

    def start(self, store: Store, drain: Drain) -> None:
        """Start the task that generates. The response has to be in the store."""
        self.task = asyncio.create_task(self._run(store, drain))

    async def cancel(self) -> None:
        """End the generation, if it has not ended."""
        if not self.is_generated:
            self.task.cancel()
        await asyncio.wait((self.task,))

    async def _run(self, store: Store, drain: Drain) -> None:
        with drain.open_request():
            try:
                await self._generate()
                self.is_generated = True
                await self._save(store)
            finally:  # also after an error, so that streams of this response end
                self._has_ended = True
                self._changed.set()

    async def _save(self, store: Store) -> None:
        """Store the response as it is. If there is no room for it, it is no longer stored."""
        generation, id = self._generation, self.response["id"]
        record = generation.record(self._events if self.keeps_events else None)
        try:
            try:
                await store.update(generation.tenant, "response", id, record)
            except StoreFull:
                await store.delete(generation.tenant, "response", id)
                raise
        except (QuireError, HTTPException) as error:
            log.warning("a response could not be stored: %s", error)

    async def _generate(self) -> None:
        generation = self._generation
        try:
            async for events in generation.steps():
                self._add(events)
        except asyncio.CancelledError:
            generation.writer.change(status="cancelled")
            return
        except Exception as error:
            generation.fail(error)
        finally:
            generation.reply.close()
        self._add([generation.writer.last_event()])

    def _add(self, events: Sequence[Event]) -> None:
        if self.keeps_events:
            self._events += (Raw(msgspec.json.encode(one)) for one in events)
            self._changed.set()
            self._changed = asyncio.Event()


class Responses:
    """The responses of one app: those in the background, and those in the store."""

    def __init__(self, service: Service, store: Store, drain: Drain) -> None:
        self._service = service
        self._store = store
        self._drain = drain
        self._running: dict[tuple[str, str], Running] = {}  # by tenant and id

    async def recover(self) -> None:
        """End the responses that were generated in the background when a server with this store ended."""
        for tenant, record in self._store.pinned("response"):
            stored = msgspec.json.decode(record, type=StoredResponse)
            response = msgspec.json.decode(stored.response)
            error = {"code": "server_error", "message": "the server was restarted; send the request again"}
            ended = {**response, "status": "failed", "error": error}
            body = msgspec.json.encode({"response": ended, "input": stored.input})
            try:
                await self._store.update(tenant, "response", response["id"], body)
            except StoreFull:
                await self._store.delete(tenant, "response", response["id"])

    async def close(self) -> None:
        """Wait until the responses in the background have ended. The engine must be closed before, which ends them."""
        tasks = [running.task for running in self._running.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_SECONDS)

    def running(self, tenant: str, id: str) -> Running | None:
        """The response if it is generated in the background."""
        return self._running.get((tenant, id))

    async def stored(self, tenant: str, id: str, param: str | None = None) -> StoredResponse:
        """The response in the store. param: the field that names it. Raises UnknownObject."""
        return msgspec.json.decode(await self._record(tenant, id, param), type=StoredResponse)

    async def input_items(self, tenant: str, id: str) -> list[dict[str, Any]]:
        """The items that a response continues. Raises UnknownObject."""
        running = self.running(tenant, id)
        return _decoded_items((await self.stored(tenant, id)).input if running is None else running.input)

    async def delete(self, tenant: str, id: str) -> None:
        """Delete a response; end it first if it is still generated. Raises UnknownObject."""
        running = self.running(tenant, id)
        if running is not None:
            await running.cancel()
        if not await self._store.delete(tenant, "response", id):
            raise UnknownObject("response", id)

    async def start(self, body: ResponseBody, request: Request, limit: TimeLimit) -> Generation:
        """Queue a response in the engine. Raises RequestError, UnicodeEncodeError, Busy, EngineStopped, RateLimited."""
        service, caller = self._service, caller_of(request)
        service.check_model(body.model)
        body.check()
        id = service.request_ids.make("resp", request)
        new_items = await service.prepare(request, lambda: _new_items(body, id))
        input = await self._conversation(caller.tenant, body.previous_response_id, new_items)
        encoded = _encoded_items(input)
        with renamed_fields(body.engine_names()):
            work = partial(_chat_request, service, body, input, request)
            is_long = len(input) > MANY
            chat = await (service.thread_pool.run(caller.tenant, work) if is_long else service.prepare(request, work))
            if body.truncation == "auto":
                chat = await service.thread_pool.run(caller.tenant, lambda: _truncated(service, chat))
            fields = _fields(id, service, body, chat.params)
            msgspec.json.encode(fields)  # raises UnicodeEncodeError for text that cannot be sent back
            reader, reply = await start_conversation(service, request, id, chat)
        writer = ResponseWriter(
            fields,
            len(new_items),
            reader.new_call_id,
            with_summary=body.summary is not None,
            with_encoded=ENCRYPTED in (body.include or ()),
            logprobs=LogprobFormat(chat.params, service.tokenizer) if body.wants_logprobs else None,
        )
        return Generation(
            caller.tenant,
            writer,
            encoded,
            (reader, reply),
            limit,
            store=None if body.store is False else self._store,
            with_padding=body.stream_options is not None and bool(body.stream_options.include_obfuscation),
            with_cache=service.options.enable_prefix_caching,
        )

    async def run_in_background(self, generation: Generation, *, keep_events: bool) -> Running:
        """Store the response as queued, and generate it on. Raises StoreFull, StoreUnavailable, Busy."""
        tenant, id = generation.tenant, generation.writer.response["id"]
        end = self._store.clock() + TTL
        try:
            await self._store.create(tenant, "response", id, generation.record(), expires_at=end, pinned=True)
        except BaseException:
            generation.reply.close()
            raise
        running = self._running[tenant, id] = Running(generation, keep_events=keep_events)
        running.start(self._store, self._drain)
        running.task.add_done_callback(lambda _: self._running.pop((tenant, id)))
        return running

    async def _record(self, tenant: str, id: str, param: str | None) -> bytes:
        running = self.running(tenant, id)
        if running is not None and running.is_generated:
            await asyncio.wait((running.task,))
        record = await self._store.get(tenant, "response", id)
        if record is None:
            raise UnknownObject("response", id, param)
        return record

    async def _conversation(
        self, tenant: str, previous_id: str | None, new_items: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """The items before and in a request, with those that it refers to. Raises UnknownObject, RequestError."""
        items: list[dict[str, Any]] = []
        if previous_id is not None:
            record = await self._record(tenant, previous_id, "previous_response_id")
            previous = msgspec.json.decode(record, type=_Conversation)
            if previous.response.status in ("queued", "in_progress"):
                raise RequestError("the response is still generated; wait for its end", "previous_response_id")
            items += (*_decoded_items(previous.input), *previous.response.output)
        known: dict[str, _Items | None] = {}
        referenced = set[str]()
        for item in new_items:
            if item["type"] == "item_reference":
                if item["id"] in referenced:  # or a short request would stand for a very long one
                    raise RequestError(f"input refers to the item {item['id']!r:.80} twice; refer to it once", "input")
                referenced.add(item["id"])
            items.append(item if item["type"] != "item_reference" else await self._referenced(tenant, item, known))
        return items

    async def _referenced(
        self, tenant: str, item: Mapping[str, Any], known: dict[str, _Items | None]
    ) -> dict[str, Any]:
        """The item that an item_reference stands for. known: by response; those that are read are added."""
        id, response_id = str(item["id"]), response_of(str(item["id"]))
        if response_id not in known:
            if len(known) >= MAX_REFERENCES:
                raise RequestError(f"input refers to more than {MAX_REFERENCES} responses; send the items", "input")
            record = await self._store.get(tenant, "response", response_id)
            conversation = None if record is None else msgspec.json.decode(record, type=_Conversation)
            known[response_id] = None if conversation is None else _Items(conversation)
        items = known[response_id]
        found = None if items is None else items.find(id)
        if found is None:
            raise UnknownObject("item", id, "input")
        return found


def _new_items(body: ResponseBody, response_id: str) -> list[dict[str, Any]]:
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


def _chat_request(service: Service, body: ResponseBody, input: Sequence[Item], request: Request) -> ChatRequest:
    """The conversation of a body. input: its items, with those before. Raises RequestError."""
    service.check_size([body.tools, body.tool_choice], "tools")  # which are part of the response
    tools = chat_tools(body.tools or (), skip_others=service.ignores_unknown_fields)
    offered = toolbox(tools, chat_tool_choice(body.tool_choice), body.parallel_tool_calls)
    return ChatRequest(
        messages=chat_messages(input, body.instructions),
        params=body.sampling_params(service.sampling_defaults),
        rendering=_rendering(body, offered),
        toolbox=offered,
        thinking_budget=body.thinking_token_budget,
        namespace=caller_of(request).namespace(body.cache_salt),
        scheduling_params=body.scheduling_params(service.options),
    )


def _rendering(body: ResponseBody, offered: Toolbox | None) -> Rendering:
    """The rendering that a body requests. Raises RequestError."""
    shown = () if offered is None or offered.choice.mode == "none" else offered.tools
    reasoning = reasoning_variables(None if body.reasoning is None else body.reasoning.effort)
    return Rendering(
        tools=[tool.raw for tool in shown] or None,
        variables=reasoning | template_variables(body.chat_template_kwargs, RENDERING_FIELDS),
    )


def _truncated(service: Service, chat: ChatRequest) -> ChatRequest:
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


def _fields(id: str, service: Service, body: ResponseBody, params: SamplingParams) -> dict[str, Any]:
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
        "model": service.model_name,
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
