"""The responses of /v1/responses while they are generated, and in the store."""

import asyncio
import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import msgspec
from fastapi import Request
from msgspec import Raw
from starlette.exceptions import HTTPException
from starlette.types import Scope

from quire.errors import ContextLengthExceeded, EngineStopped, QuireError, RequestError
from quire.server.api.conversation import (
    MessageReader,
    start_conversation,
)
from quire.server.api.openai.logprobs import LogprobFormat
from quire.server.api.openai.responses_output import (
    DELTA,
    Event,
    ResponseWriter,
    now,
    response_usage,
)
from quire.server.api.openai.responses_request import chat_request, items_of, response_fields, truncated
from quire.server.api.openai.responses_schema import (
    ENCRYPTED,
    Item,
    ResponseBody,
)
from quire.server.api.openai.responses_tools import read_tools
from quire.server.api.openai.stored_responses import (
    PIECE_BYTES,
    Earlier,
    Input,
    Pieces,
    ResponseObject,
    StoredResponse,
    StoredResponses,
    new_input,
    sent_event,
)
from quire.server.errors import Busy, StoreFull, StoreUnavailable, UnknownObject, describe, renamed_fields
from quire.server.middleware.auth import caller_of
from quire.server.middleware.drain import Drain
from quire.server.observability.request_record import record_error
from quire.server.reply import Reply, check_end
from quire.server.request_body import MANY
from quire.server.service import Service
from quire.server.sse import TimeLimit, event, padded
from quire.server.store import Store
from quire.server.thread_pool import ThreadPool
from quire.tenant_memory import LARGE, HeldBytes, TenantMemory

log = logging.getLogger(__name__)
T = TypeVar("T")

CLOSE_SECONDS = 2.0  # for responses in the background to be stored as failed, once the engine is closed
UNFINISHED_CALL = "unfinished_call"  # why a response is incomplete whose call a stop string cut
_MANY_EVENTS = 512  # of a response that is encoded on a thread
_INCOMPLETE = {"length": "max_output_tokens", "abort": "deadline"}  # by finish reason


class Generation:
    """One response while it is generated. Must be closed, generated or not.

    object: where it is stored; None if it is not. pool: for work that grows with the response. with_padding: pad events
    that have text. with_cache: whether computed prompt tokens are cached.
    """

    def __init__(
        self,
        tenant: str,
        writer: ResponseWriter,
        conversation: tuple[MessageReader, Reply],
        limit: TimeLimit,
        *,
        object: ResponseObject | None,
        pool: ThreadPool,
        with_padding: bool,
        with_cache: bool,
    ) -> None:
        self.tenant = tenant
        self.writer = writer
        self._reader, self.reply = conversation
        self._limit = limit
        self._kept: HeldBytes | None = None
        self.object = object
        self._pool = pool
        self._with_padding = with_padding
        self._with_cache = with_cache
        self._deletion: asyncio.Task[None] | None = None

    @property
    def is_long(self) -> bool:
        """Whether the response is encoded on a thread."""
        return self.writer.num_events > _MANY_EVENTS

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
        yield await self._encoded(partial(event, last, last["type"]))

    async def encoded(self) -> bytes:
        """The response as it is now, as JSON."""
        return await self._encoded(partial(msgspec.json.encode, self.writer.response))

    def keep(self, memory: TenantMemory, num_bytes: int) -> None:
        """Count bytes that are kept of the request until it is closed."""
        self._kept = HeldBytes(memory)
        self._kept.add(num_bytes)

    async def begin(self, input: Input, *, is_required: bool) -> None:
        """Store the input, if it is long. If that fails, the response is not stored, and says so.

        is_required: whether it has to be stored. Raises UnknownObject for an earlier response that was deleted
        meanwhile, Busy, and if it is required StoreFull, StoreUnavailable.
        """
        if self.object is not None:
            try:
                await self.object.begin(input)
            except (StoreFull, StoreUnavailable) as error:
                if is_required:
                    raise
                log.warning("a response could not be stored: %s", error)
                self.writer.change(store=False)
                with suppress(StoreUnavailable):
                    await self.object.delete()
                self.object = None

    def close(self) -> None:
        """End the generation, and delete an incomplete object from the store. Can be called again."""
        self.reply.release()
        if self._kept is not None:
            self._kept.release()
        if self.object is not None and self.object.is_unfinished and self._deletion is None:
            self._deletion = asyncio.create_task(self.object.delete())

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

    def _is_padded(self, one: Event) -> bool:
        return self._with_padding and one["type"].endswith(DELTA)

    async def _encoded(self, encode: Callable[[], bytes]) -> bytes:
        if self.is_long:
            try:
                return await self._pool.run(self.tenant, encode)
            except (EngineStopped, Busy):  # the response has to be stored all the same
                pass
        return encode()

    async def _save(self) -> None:
        """Store the response. If there is no room, or no store, it says that it is not stored."""
        if self.object is None:
            return
        try:
            await self.object.save(await self.encoded())
        except (QuireError, HTTPException) as error:
            log.warning("a response could not be stored: %s", error)
            self.writer.change(store=False)


class Running:
    """A response that is generated in the background. keep_events: whether its stream can be read, at any time.

    The last events are in memory. Those before are in the store, in pieces.
    """

    def __init__(self, generation: Generation, object: ResponseObject, reader: StoredResponses, id: str) -> None:
        self._generation = generation
        self._object = object
        self._reader = reader
        self._id = id
        self.keeps_events = False
        self._firsts: list[int] = []  # sequence numbers with which the pieces of events in the contents begin,
        self._places: list[range] = []  # their places,
        self._sizes: list[int] = []  # and bytes
        self._events: list[Raw] = []  # behind those in the contents
        self._num_stored = 0  # events in the contents
        self._num_bytes = 0  # of `_events`
        self._storing: asyncio.Future[None] | None = None  # the last move of events to the store
        self._changed = asyncio.Event()  # replaced with each change
        self.is_generated = False  # what is left is to store it
        self._has_ended = False
        self.task: asyncio.Task[None]

    @property
    def is_long(self) -> bool:
        """See Generation."""
        return self._generation.is_long

    async def encoded(self) -> bytes:
        """The response as it is now, as JSON."""
        return await self._generation.encoded()

    async def events(self, first: int = 0) -> AsyncIterator[bytes]:
        """The events from this sequence number on, as they are sent: those in the store a piece at a time."""
        while True:
            changed = self._changed
            if first < self._num_stored:
                piece = bisect_right(self._firsts, first) - 1
                begin, places = self._firsts[piece], self._places[piece]
                number, data = await self._reader.sent_piece(self._generation.tenant, self._id, places, first - begin)
                first = begin + number
                yield data
            elif events := self._events[first - self._num_stored :]:
                first += len(events)
                yield b"".join(map(sent_event, events))
            elif self._has_ended:
                return
            else:
                await changed.wait()

    def start(self, drain: Drain, *, keep_events: bool) -> None:
        """Start the task that generates. The response has to be in the store. keep_events: for `events`."""
        self.keeps_events = keep_events
        self.task = asyncio.create_task(self._run(drain))

    async def cancel(self) -> None:
        """End the generation, if it has not ended."""
        if not self.is_generated and not self.task.cancelling():  # a second time would cut off how it ends
            self.task.cancel()
        await asyncio.wait((self.task,))

    async def _run(self, drain: Drain) -> None:
        with drain.open_request():
            try:
                await self._generate()
                self.is_generated = True
                await self._save()
            finally:  # also after an error, so that streams of this response end
                self._has_ended = True
                self._changed.set()

    async def _save(self) -> None:
        """Store the response as it is. If there is no room for it, it is no longer stored."""
        try:
            try:
                await self._object.save(await self.encoded(), await self._stored_events())
            except StoreFull:
                await self._object.delete()
                raise
        except (QuireError, HTTPException) as error:
            log.warning("a response could not be stored: %s", error)

    async def _stored_events(self) -> bytes:
        """The events as in `StoredResponse`; null if not all of them can be stored. Raises StoreFull."""
        if not self.keeps_events:
            return b"null"
        if not self._firsts and self._num_bytes <= LARGE:
            return msgspec.json.encode(self._events)
        if self._events:
            try:
                await self._store_events()
            except (StoreUnavailable, Busy) as error:
                log.warning("the events of a response could not be stored: %s", error)
                return b"null"
        num_rows = [len(places) for places in self._places]
        return msgspec.json.encode(Pieces(num_rows, sum(self._sizes), max(self._sizes)))

    async def _store_events(self) -> None:
        """Move the events in memory to the store. Raises StoreFull, StoreUnavailable, Busy."""
        piece = msgspec.json.encode(self._events)
        first = self._object.num_rows
        number = await self._object.append(piece)
        self._places.append(range(first, first + number))
        self._firsts.append(self._num_stored)
        self._sizes.append(len(piece))
        self._num_stored += len(self._events)
        self._events, self._num_bytes = [], 0

    async def _generate(self) -> None:
        generation = self._generation
        try:
            async for events in generation.steps():
                self._add(events)
                if self._num_bytes > PIECE_BYTES:
                    self._storing = asyncio.ensure_future(self._store_events())
                    await asyncio.shield(self._storing)
        except asyncio.CancelledError:
            if self._storing is not None:
                await asyncio.wait((self._storing,))
            generation.writer.change(status="cancelled")
            return
        except Exception as error:
            generation.fail(error)
        finally:
            generation.close()
        self._add([generation.writer.last_event()])

    def _add(self, events: Sequence[Event]) -> None:
        if self.keeps_events:
            encoded = [Raw(msgspec.json.encode(one)) for one in events]
            self._events += encoded
            self._num_bytes += sum(map(len, encoded))
            self._changed.set()
            self._changed = asyncio.Event()


class Responses:
    """The responses of one app: those in the background, and those in the store."""

    def __init__(self, service: Service, store: Store, drain: Drain) -> None:
        self._service = service
        self._store = store
        self._drain = drain
        self.reader = StoredResponses(service, store)
        self._running: dict[tuple[str, str], Running] = {}  # by tenant and id

    async def recover(self) -> None:
        """End the responses that were generated in the background when a server with this store ended."""
        await self._store.end_interrupted("response", _interrupted)

    async def close(self) -> None:
        """Wait until the responses in the background have ended. The engine must be closed before, which ends them."""
        tasks = [running.task for running in self._running.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_SECONDS)

    def running(self, tenant: str, id: str) -> Running | None:
        """The response if it is generated in the background."""
        return self._running.get((tenant, id))

    async def stored(self, tenant: str, id: str, held: HeldBytes) -> StoredResponse:
        """The response in the store. held: counts it, if it is large. Raises UnknownObject, TenantMemoryFull."""
        await self._settled(tenant, id)
        return await self.reader.load(tenant, id, held)

    async def delete(self, tenant: str, id: str) -> None:
        """Delete a response; end it first if it is still generated. Raises UnknownObject."""
        running = self.running(tenant, id)
        if running is not None:
            await running.cancel()
        if not await self._store.delete(tenant, "response", id):
            raise UnknownObject("response", id)

    async def start(self, body: ResponseBody, request: Request, limit: TimeLimit) -> Generation:
        """Queue a response in the engine, and store its input if that is long.

        Raises RequestError, UnicodeEncodeError, Busy, EngineStopped, RateLimited, TenantMemoryFull, StoreUnavailable.
        """
        service, caller = self._service, caller_of(request)
        model = await service.served_model(request, body.model)
        body.check()
        id = service.request_ids.make("resp", request)
        new_items = await service.prepare(request, lambda: items_of(body, id))
        earlier, added = await self._conversation(request, body, new_items)
        items = [*earlier.kept, *added]
        are_long = len(items) > MANY or earlier.source is not None or request.state.body_bytes.is_large

        async def prepared(work: Callable[[], T]) -> T:
            return await service.thread_pool.run(caller.tenant, work) if are_long else work()

        input = await prepared(partial(new_input, earlier, added))
        with renamed_fields(body.engine_names()):
            service.check_size([body.tools, body.tool_choice], "tools")  # which are part of the response
            tools = read_tools(body.tools or ())
            service.ignore(request, "tools", tools.left_out)
            chat = await prepared(partial(chat_request, service, body, model, tools, items, request))
            if body.truncation == "auto":
                chat = await service.thread_pool.run(caller.tenant, lambda: truncated(service, chat))
            fields = response_fields(id, model, body, chat.params)
            num_bytes = len(await prepared(lambda: msgspec.json.encode(fields)))  # or UnicodeEncodeError: not sent back
            reader, reply = await start_conversation(service, request, id, chat)
            reader.transcript(reply).drop_logprobs()
        writer = ResponseWriter(
            fields,
            len(new_items),
            reader.new_call_id,
            tools.origins,
            with_summary=body.summary is not None,
            with_encoded=ENCRYPTED in (body.include or ()),
            logprobs=LogprobFormat(chat.params, service.tokenizer) if body.wants_logprobs else None,
        )
        generation = Generation(
            caller.tenant,
            writer,
            (reader, reply),
            limit,
            object=None if body.store is False else ResponseObject(self._store, caller.tenant, id),
            pool=service.thread_pool,
            with_padding=body.stream_options is not None and bool(body.stream_options.include_obfuscation),
            with_cache=service.options.enable_prefix_caching,
        )
        if num_bytes > LARGE:
            generation.keep(service.memories.of(caller.tenant), num_bytes)
        try:
            await generation.begin(input, is_required=bool(body.background))
        except BaseException:
            generation.close()
            raise
        return generation

    async def run_in_background(self, generation: Generation, *, keep_events: bool) -> Running:
        """Store the response as queued, and generate it on. Raises StoreFull, StoreUnavailable, Busy."""
        tenant, id, object = generation.tenant, generation.writer.response["id"], generation.object
        assert object is not None, "a response in the background is stored"
        try:
            await object.save(await generation.encoded(), pinned=True)
        except BaseException:
            generation.close()
            raise
        running = self._running[tenant, id] = Running(generation, object, self.reader, id)
        running.start(self._drain, keep_events=keep_events)
        running.task.add_done_callback(lambda _: self._running.pop((tenant, id)))
        return running

    async def _settled(self, tenant: str, id: str) -> None:
        """Wait until a response that is generated is stored."""
        running = self.running(tenant, id)
        if running is not None and running.is_generated:
            await asyncio.wait((running.task,))

    async def _conversation(
        self, request: Request, body: ResponseBody, new_items: Sequence[Item]
    ) -> tuple[Earlier, list[Item]]:
        """The items before a request, and its own with those that it refers to. They count as bytes of its body.

        Raises UnknownObject, RequestError, TenantMemoryFull.
        """
        tenant, held, previous_id = caller_of(request).tenant, request.state.body_bytes, body.previous_response_id
        earlier = Earlier([], [])
        if previous_id is not None:
            await self._settled(tenant, previous_id)
            most = self._service.max_characters
            earlier = await self.reader.earlier(tenant, previous_id, held, most)
            if earlier.is_cut and body.truncation != "auto":
                raise ContextLengthExceeded(
                    f"the conversation of the response {previous_id!r:.80} has more than {most:,} characters, which "
                    f"cannot fit into the context of {self._service.max_model_len} tokens (max_model_len); use "
                    "truncation auto, or begin another conversation",
                    "previous_response_id",
                )
        ids = [str(item["id"]) for item in new_items if item["type"] == "item_reference"]
        if not ids:
            return earlier, list(new_items)
        twice = next((id for id, number in Counter(ids).items() if number > 1), None)
        if twice is not None:  # or a short request would stand for a very long one
            raise RequestError(f"input refers to the item {twice!r:.80} twice; refer to it once", "input")
        found = await self.reader.referenced(tenant, ids, held)
        return earlier, [found[item["id"]] if item["type"] == "item_reference" else item for item in new_items]


def _interrupted(record: bytes) -> bytes:
    """The record of a response in the background that was not stored to its end, as failed."""
    stored = msgspec.json.decode(record, type=StoredResponse)
    message = "the server was restarted, or could not store the response; send the request again"
    error = {"code": "server_error", "message": message}
    ended = {**msgspec.json.decode(stored.response), "status": "failed", "error": error}
    return msgspec.json.encode({"response": ended, "input": stored.input})
