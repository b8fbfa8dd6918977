"""Batches of /v1/batches: the requests of a stored file, sent in the background, with results in stored files.

A batch is an object of the store from its creation, and so are its files with results. After a restart of a server with
a store in a file, a batch goes on: requests that have a result are not sent again. A batch waits while the store fails.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

import msgspec
from starlette.types import ASGIApp

from quire.errors import QuireError
from quire.server.api_keys import KEYLESS_CALLER, Caller, Keys
from quire.server.batch.file_format import RESULT_DECODER, BadLine, LineSplitter, Task, TaskReader, result_line
from quire.server.batch.in_process_client import Response
from quire.server.batch.sender import BatchStopped, send_lines
from quire.server.batch.stored_files import TTL, file_object
from quire.server.errors import Busy, StoreUnavailable, describe
from quire.server.middleware.drain import Drain
from quire.server.service import Service
from quire.server.store import Store

log = logging.getLogger(__name__)

T = TypeVar("T")

WINDOW = 86_400  # seconds in which a batch has to end: its completion_window
MAX_LINES = 50_000  # OpenAI's limit
MAX_PROBLEMS = 100  # lines of an invalid file that a batch names
FLUSH_BYTES = 2**18  # of results that are not in the store yet,
FLUSH_SECONDS = 5.0  # and the time after which the next one takes them there
CLOSE_SECONDS = 2.0  # for batches to store their last results when the server ends
RETRY_SECONDS = 1.0  # between two tries of a store that fails
LOWEST_PRIORITY = 2**31 - 1

_ENDED = ("completed", "failed", "expired", "cancelled")
_TIMES = ("in_progress", "finalizing", "cancelling", *_ENDED)  # statuses whose time a batch has
_FILES = {"output_file_id": "completed", "error_file_id": "failed"}  # files of results -> the count of their lines


class BatchRecord(msgspec.Struct):
    """A batch in the store. batch: OpenAI's object. file_ttl: seconds for which files with results are stored.

    adapters: names of those that its requests may use; None: all of the server.
    """

    batch: dict[str, Any]
    file_ttl: int
    adapters: list[str] | None = None


class _Failed(QuireError):
    """The batch cannot go on. problems: OpenAI's objects."""

    def __init__(self, *problems: dict[str, object]) -> None:
        super().__init__("the batch has failed")
        self.problems = problems


class Batches:
    """The batches of one app.

    keys: of the server. After a restart, a batch is sent with the first key of its tenant, and with the adapters of the
    key that created it.
    """

    def __init__(self, service: Service, store: Store, drain: Drain, keys: Keys | None) -> None:
        self._service = service
        self._store = store
        self._drain = drain
        self._keys = keys
        self._app: ASGIApp
        self._running: dict[tuple[str, str], _Run] = {}  # by tenant and id
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by tenant: one batch at a time
        num_rows = service.options.max_num_seqs * service.engine.num_replicas
        self._concurrency = max(1, num_rows // 2)  # so that rows stay free for other requests
        self._slots = asyncio.Semaphore(self._concurrency)  # of the requests of all batches
        self._resuming: asyncio.Task[None] | None = None

    async def start(self, app: ASGIApp) -> None:
        """Continue the batches that had not ended when the last server with this store did. app: gets all requests."""
        self._app = app
        try:
            await self._resume()
        except StoreUnavailable:
            self._resuming = asyncio.create_task(self._resume_later())

    async def close(self) -> None:
        """Stop. Requests that have a response get CLOSE_SECONDS to be stored. Batches go on with the next server."""
        if self._resuming is not None:
            self._resuming.cancel()
        for run in self._running.values():
            run.is_last_try = True
        tasks = [run.task for run in self._running.values()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def create(
        self, caller: Caller, endpoint: str, input_file_id: str, metadata: Mapping[str, str], file_ttl: int | None
    ) -> dict[str, Any]:
        """A new batch over a stored file, as OpenAI's object. file_ttl: of its results; None: TTL. Raises StoreFull."""
        now = int(self._store.clock())
        batch: dict[str, Any] = {
            "id": f"batch_{uuid4().hex}",
            "object": "batch",
            "endpoint": endpoint,
            "model": self._service.model_name,
            "errors": None,
            "input_file_id": input_file_id,
            "completion_window": "24h",
            "status": "validating",
            **dict.fromkeys(_FILES),
            "created_at": now,
            "expires_at": now + WINDOW,
            **dict.fromkeys(f"{status}_at" for status in _TIMES),
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": dict(metadata),
        }
        adapters = None if caller.adapters is None else sorted(caller.adapters)
        record = BatchRecord(batch, file_ttl or TTL, adapters)
        data = msgspec.json.encode(record)
        await self._store.create(caller.tenant, "batch", batch["id"], data, expires_at=now + TTL, pinned=True)
        self._begin(caller.tenant, record, caller)
        return batch

    async def get(self, tenant: str, id: str) -> dict[str, Any] | None:
        """The batch; None if there is none."""
        run = self._running.get((tenant, id))
        if run is not None:
            return run.batch
        data = await self._store.get(tenant, "batch", id)
        return None if data is None else self._current(tenant, data)

    async def page(self, tenant: str, limit: int, after: str | None) -> list[dict[str, Any]] | None:
        """At most `limit` batches, newest first, behind the batch `after`. None if there is no such batch."""
        records = await self._store.page(tenant, "batch", limit, after=after)
        return None if records is None else [self._current(tenant, data) for data in records]

    def cancel(self, tenant: str, id: str) -> None:
        """Cancel a batch, if it has not ended."""
        run = self._running.get((tenant, id))
        if run is not None:
            run.cancel()

    def _current(self, tenant: str, data: bytes) -> dict[str, Any]:
        """The batch of a record, as it is now."""
        batch = msgspec.json.decode(data, type=BatchRecord).batch
        run = self._running.get((tenant, batch["id"]))
        return batch if run is None else run.batch

    async def _resume(self) -> None:
        """Begin the batches of an earlier server. Raises StoreUnavailable."""
        for tenant, id in await self._store.pinned("batch"):
            data = None if (tenant, id) in self._running else await self._store.get(tenant, "batch", id)
            if data is not None:
                keys = self._keys
                caller = keys.caller_of_tenant(tenant) if keys is not None else None if tenant else KEYLESS_CALLER
                record = msgspec.json.decode(data, type=BatchRecord)
                if caller is not None:
                    adapters = None if record.adapters is None else frozenset(record.adapters)
                    caller = msgspec.structs.replace(caller, adapters=adapters)
                self._begin(tenant, record, caller)

    async def _resume_later(self) -> None:
        """`_resume`, once the store can be read."""
        while True:
            await asyncio.sleep(RETRY_SECONDS)
            with suppress(StoreUnavailable):
                return await self._resume()

    def _begin(self, tenant: str, record: BatchRecord, caller: Caller | None) -> None:
        id = record.batch["id"]
        run = self._running[tenant, id] = _Run(self._service, self._store, self._drain, tenant, record)
        send = partial(send_lines, self._app, concurrency=self._concurrency, slots=self._slots, caller=caller)
        run.task = asyncio.create_task(run.run(None if caller is None else send, self._turns[tenant]))
        run.task.add_done_callback(lambda _: self._running.pop((tenant, id)))


class _Run:
    """One batch that has not ended. It gets the results of `send_lines`."""

    def __init__(self, service: Service, store: Store, drain: Drain, tenant: str, record: BatchRecord) -> None:
        self.batch = record.batch
        self.task: asyncio.Task[None]
        self._defaults: dict[str, object] = {}  # of fields of requests
        if service.options.policy == "priority":
            self._defaults["priority"] = LOWEST_PRIORITY
        if self.batch["endpoint"] == "/v1/responses":
            self._defaults["store"] = False  # or a batch would take the room of other responses
        self._store = store
        self._drain = drain
        self._tenant = tenant
        self._record = record
        self._done_ids: set[str] = set()  # custom_ids that have a result
        self._unwritten: dict[str, list[bytes]] = {name: [] for name in _FILES}
        self._num_unwritten_bytes = 0
        self._written_at = asyncio.get_running_loop().time()
        self._writing = asyncio.Lock()
        self._is_cancelled = False
        self.is_last_try = False  # the server ends, and a store that fails is not tried again

    def cancel(self) -> None:
        """Cancel the batch, which keeps the results that it has."""
        if not self._is_cancelled and self.batch["status"] in ("validating", "in_progress"):
            self._is_cancelled = True
            self._set_status("cancelling")
            self.task.cancel()

    async def run(self, send: Callable[..., Awaitable[None]] | None, turn: asyncio.Lock) -> None:
        """Run the batch to its end, or until the server ends.

        send: `send_lines`, but for lines and results; None if nobody may send them. turn: held while they are sent.
        """
        status, problems = await self._outcome(self._send(send, turn))
        failed, more_problems = await self._outcome(self._write())
        if failed == "failed":
            status, problems = failed, more_problems
        if status in _ENDED:
            self._set_status(status)
        if problems:
            self.batch["errors"] = {"object": "list", "data": problems}
        await self._outcome(self._save())

    async def _outcome(self, work: Awaitable[None]) -> tuple[str, list[dict[str, object]]]:
        """The status after `work`, and the errors. It is empty if the batch is to go on with the next server."""
        try:
            await work
        except TimeoutError:
            return "expired", []
        except asyncio.CancelledError:
            return "cancelled" if self._is_cancelled else "", []
        except (BatchStopped, StoreUnavailable) as error:
            log.warning("the batch %s goes on with the next server: %s", self.batch["id"], error)
            return "", []
        except _Failed as error:
            return "failed", list(error.problems)
        except Exception as error:
            body: Mapping[str, Any] = describe(error)[1]
            return "failed", [_problem("batch_failed", body["error"]["message"])]
        return "completed", []

    def has(self, found: Task | BadLine) -> bool:
        """Whether there is a result of this request."""
        return found.custom_id in self._done_ids

    async def add(self, found: Task | BadLine, answer: Response | None) -> None:
        """Add a result. Raises StoreFull, StoreUnavailable."""
        name = "output_file_id" if answer is not None and answer.status < 400 else "error_file_id"
        line = result_line(found, answer)
        self.batch["request_counts"][_FILES[name]] += 1
        self._unwritten[name].append(line)
        self._num_unwritten_bytes += len(line)
        age = asyncio.get_running_loop().time() - self._written_at
        if self._num_unwritten_bytes >= FLUSH_BYTES or age >= FLUSH_SECONDS:
            await asyncio.shield(asyncio.ensure_future(self._write()))  # a result is written once, or not at all

    async def _send(self, send: Callable[..., Awaitable[None]] | None, turn: asyncio.Lock) -> None:
        """Check the file, and send its requests. Raises _Failed, BatchStopped, TimeoutError, and as `add`."""
        async with asyncio.timeout(max(0.0, self.batch["expires_at"] - self._store.clock())), turn:
            if send is None:
                raise _Failed(_problem("key_removed", "the server has no key of the batch's tenant any more"))
            counts = self.batch["request_counts"]
            counts["total"] = await self._num_requests()
            await self._read_results()
            self._set_status("in_progress")
            await self._save()
            await send(self._tasks(), self)
            if self._drain.begun:
                raise BatchStopped("the server is shutting down")
            if counts["completed"] + counts["failed"] < counts["total"]:
                raise _Failed(_problem("file_deleted", "the input file was deleted before all requests were sent"))
            self._set_status("finalizing")

    async def _num_requests(self) -> int:
        """Number of requests in the file. Raises _Failed if a line is none."""
        num_lines, problems = 0, list[dict[str, object]]()
        async for found in self._lines():
            num_lines += 1
            if num_lines > MAX_LINES:
                raise _Failed(_problem("too_many_lines", f"the file has more than {MAX_LINES:,} requests"))
            if isinstance(found, BadLine):
                problems.append(_problem(found.code, found.message, found.number))
            elif found.url != self.batch["endpoint"]:
                message = f"the url {found.url} is not the endpoint of the batch, {self.batch['endpoint']}"
                problems.append(_problem("mismatched_endpoint", message, found.number))
            if len(problems) >= MAX_PROBLEMS:
                break
        if not num_lines:
            raise _Failed(_problem("empty_file", "the file has no request"))
        if problems:
            raise _Failed(*problems)
        return num_lines

    async def _tasks(self) -> AsyncIterator[Task | BadLine]:
        """The requests of the file until the server drains, with the defaults of batches."""
        async for found in self._lines():
            if self._drain.begun:
                return
            yield found._replace(body=_with_defaults(found.body, self._defaults)) if isinstance(found, Task) else found

    async def _lines(self) -> AsyncIterator[Task | BadLine]:
        """The lines of the file, parsed on a thread."""
        reader = TaskReader()
        async for piece in self._pieces(self.batch["input_file_id"]):
            for found in await asyncio.to_thread(reader.push, piece):
                yield found
        for found in reader.finish():
            yield found

    async def _pieces(self, file_id: str) -> AsyncIterator[bytes]:
        place = 0
        while (
            piece := await self._patiently(partial(self._store.content, self._tenant, "file", file_id, place))
        ) is not None:
            yield piece
            place += 1

    async def _read_results(self) -> None:
        """Read the results of an earlier run."""
        for name, count in _FILES.items():
            self.batch["request_counts"][count], lines = 0, LineSplitter()
            async for piece in self._pieces(self.batch[name] or ""):
                for _, line in lines.push(piece):
                    self._done_ids.add(str(RESULT_DECODER.decode(line).custom_id))
                    self.batch["request_counts"][count] += 1

    async def _write(self) -> None:
        """Write the results that are not in the store, and the batch. Raises StoreFull, StoreUnavailable, _Failed."""
        async with self._writing:
            unwritten, self._unwritten = self._unwritten, {name: [] for name in _FILES}
            self._num_unwritten_bytes, self._written_at = 0, asyncio.get_running_loop().time()
            for name, lines in unwritten.items():
                if lines:
                    await self._append(name, b"".join(lines))
            await self._save()

    async def _append(self, name: str, data: bytes) -> None:
        """Add results to the file whose id is the field `name` of the batch. Creates the file for the first ones."""
        tenant, now, id = self._tenant, int(self._store.clock()), self.batch[name]
        body: bytes | None
        if id is None:
            id = f"file-{uuid4().hex}"
            filename = f"{self.batch['id']}_{_FILES[name]}.jsonl"
            body = msgspec.json.encode(file_object(id, filename, "batch_output", 0, now, self._record.file_ttl))
            create = partial(self._store.create, tenant, "file", id, body)
            await self._patiently(partial(create, expires_at=now + self._record.file_ttl, pinned=True))
            self.batch[name] = id
            await self._save()
        body = await self._patiently(partial(self._store.get, tenant, "file", id))
        if body is None:
            raise _Failed(_problem("file_deleted", f"the file {id} with results was deleted"))
        file = msgspec.json.decode(body)
        file["bytes"] += len(data)
        await self._patiently(partial(self._store.append, tenant, "file", id, data, msgspec.json.encode(file)))

    async def _save(self) -> None:
        """Store the batch as it is. Raises StoreFull, StoreUnavailable."""
        data, is_open = msgspec.json.encode(self._record), self.batch["status"] not in _ENDED
        await self._patiently(
            partial(self._store.update, self._tenant, "batch", self.batch["id"], data, pinned=is_open)
        )

    async def _patiently(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work`, repeated while the store fails, or too many jobs of the tenant wait for it."""
        while True:
            try:
                return await work()
            except Busy:
                await asyncio.sleep(0.1)
            except StoreUnavailable:
                if self.is_last_try:
                    raise
                await asyncio.sleep(RETRY_SECONDS)

    def _set_status(self, status: str) -> None:
        if self.batch["status"] != status:
            self.batch["status"] = status
            self.batch[f"{status}_at"] = int(self._store.clock())


def _problem(code: str, message: str, line: int | None = None) -> dict[str, object]:
    return {"code": code, "message": message, "line": line, "param": None}


def _with_defaults(body: bytes, defaults: Mapping[str, object]) -> bytes:
    """The body of a request with values for fields that it does not have, or that are null."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return body  # no object: the route says so
    missing = {name: value for name, value in defaults.items() if bytes(fields.get(name, b"null")) == b"null"}
    return msgspec.json.encode({**fields, **missing}) if missing else body
