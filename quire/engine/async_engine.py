"""AsyncEngine: the engine on a thread of its own, behind an asyncio face. Knows token ids, no text and no HTTP.

The thread owns the Engine; nothing else touches it. What others want of it are commands, which the
thread runs between steps. What a step brings crosses to the event loop in one call.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

from quire.core.explanation import Explanation
from quire.core.output import Output
from quire.engine.engine import Engine, EngineStats, Learnt
from quire.engine.generations import NewRequest
from quire.errors import QuireError

T = TypeVar("T")

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.5  # how long the thread sleeps at most; also how often an idle engine shows that it lives
STALL_SECONDS = 2.0  # without a sign of life
FAILED_STEPS = 3  # in a row; fewer may be the fault of one request


class EngineStopped(QuireError):
    """The engine takes no requests: it is being shut down, or it failed."""


class Health(NamedTuple):
    """Whether the engine answers; `problem` is empty when it does, and has no figures of it. Ages in seconds."""

    problem: str
    heartbeat_age: float
    stats: EngineStats


class Stream:
    """What the engine says about some requests, step by step. Close it, finished or not."""

    def __init__(self, close: Callable[[], None]) -> None:
        self.close = close
        self._outputs: list[Output] = []
        self._error: QuireError | None = None
        self._ready = asyncio.Event()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Output]:
        """All that is new. Raises EngineStopped when nothing more can come; otherwise it never ends by itself."""
        await self._ready.wait()
        self._ready.clear()
        if self._error is not None and not self._outputs:
            self._ready.set()
            raise self._error
        outputs, self._outputs = self._outputs, []
        if self._error is not None:
            self._ready.set()
        return outputs

    def put(self, output: Output) -> None:
        """Called on the event loop."""
        self._outputs.append(output)
        self._ready.set()

    def fail(self, error: QuireError) -> None:
        """Called on the event loop."""
        self._error = error
        self._ready.set()


class AsyncEngine:
    """One engine thread, one event loop. `start` and all other methods belong to that loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._closing = False
        self._streams: dict[str, Stream] = {}
        self._asked: set[asyncio.Future[Any]] = set()  # what somebody waits for
        self._stopped: EngineStopped | None = EngineStopped("the engine has not been started")
        self._heartbeat = time.monotonic()
        self._stats = engine.stats()
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop

    def start(self) -> None:
        """Start the thread; outputs go to the event loop that is running."""
        self._loop = asyncio.get_running_loop()
        self._stopped = None
        self._heartbeat = time.monotonic()
        self._thread.start()

    async def close(self) -> None:
        """End the thread after the step it is in. Open streams fail."""
        if self._stopped is None:
            self._stop(EngineStopped("the server is shutting down"))
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)
        self._engine.close()

    async def generate(self, requests: Sequence[NewRequest]) -> Stream:
        """Queue requests, all or none. Raises RequestError for one that cannot be served, and EngineStopped."""
        self._check_running()
        ids = [request.request_id for request in requests]
        stream = Stream(partial(self._give_up, ids))
        self._streams.update(dict.fromkeys(ids, stream))
        try:
            await self._ask(partial(self._add, requests))
        except BaseException:  # also when the caller is cancelled
            stream.close()
            raise
        return stream

    def finish(self, seq_id: int, num_tokens: int) -> None:
        """A stop string ended this sequence after `num_tokens` output tokens."""
        self._command(partial(self._engine.finish, seq_id, num_tokens))

    async def explain(self, request_ids: Iterable[str]) -> list[Explanation]:
        """What became of these requests; those that are unknown or were long ago are left out. Raises EngineStopped."""
        return await self._ask(partial(self._explain, request_ids))

    async def flush_cache(self) -> int:
        """Forget all KV that no running request holds; the number of blocks that are free now. Raises EngineStopped."""
        return await self._ask(self._engine.flush_cache)

    async def learnt(self) -> Learnt | None:
        """What the engine has learnt of its costs and blocks; None where it does not answer at once."""
        try:
            return await asyncio.wait_for(self._ask(self._engine.learnt), STALL_SECONDS)
        except (EngineStopped, TimeoutError):
            return None

    def health(self) -> Health:
        """Whether the engine answers, as far as can be seen from here."""
        age = time.monotonic() - self._heartbeat
        problem = str(self._stopped or "")
        if not problem and age > STALL_SECONDS:
            problem = f"the engine has not moved for more than {STALL_SECONDS:g} s"
        if not problem and self._stats.failed_in_a_row >= FAILED_STEPS:
            problem = f"the last {FAILED_STEPS} steps failed; the log says why"
        return Health(problem, age, self._stats)

    def _give_up(self, ids: Sequence[str]) -> None:
        known = [request_id for request_id in ids if self._streams.pop(request_id, None) is not None]
        for request_id in known:  # one that has ended is unknown to the engine, which then does nothing
            self._command(partial(self._engine.abort, request_id))

    def _check_running(self) -> None:
        if self._stopped is not None:
            raise self._stopped

    async def _ask(self, question: Callable[[], T]) -> T:
        """What `question` returns or raises on the engine's thread, between two steps. Raises EngineStopped."""
        self._check_running()
        answer: asyncio.Future[T] = self._loop.create_future()
        self._asked.add(answer)
        self._command(partial(self._answer, question, answer))
        try:
            return await answer
        finally:
            self._asked.discard(answer)

    def _command(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _stop(self, reason: EngineStopped) -> None:
        self._stopped = reason
        for stream in set(self._streams.values()):
            stream.fail(reason)
        for answer in self._asked:
            _fail(answer, reason)

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)

    # From here on: the engine's thread.

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception:  # a bug: requests cannot go on, but all who wait must hear of it
            log.exception("the engine failed")
            self._on_loop(self._stop, EngineStopped("the engine failed; its log says why"))

    def _turn(self) -> bool:
        idle = False
        with self._wake:
            if not (self._commands or self._closing or self._engine.has_work):
                idle = not self._wake.wait(IDLE_SECONDS)
            commands = list(self._commands)
            self._commands.clear()
        self._heartbeat = time.monotonic()
        if idle:
            self._look_over()
        for command in commands:
            command()
        outputs = self._engine.step() if self._engine.has_work and not self._closing else []
        self._stats = self._engine.stats()
        if outputs:
            self._on_loop(self._deliver, outputs)
        return not self._closing

    def _look_over(self) -> None:
        try:
            self._engine.look_over()
        except Exception:  # what only checks must not be the end of what it checks
            log.exception("the memory could not be checked")

    def _answer(self, question: Callable[[], T], answer: "asyncio.Future[T]") -> None:
        try:
            self._on_loop(_settle, answer, question())
        except Exception as error:  # whatever is wrong with a question is told to the one who asked it
            self._on_loop(_fail, answer, error)

    def _add(self, requests: Sequence[NewRequest]) -> None:
        for i, request in enumerate(requests):
            self._heartbeat = time.monotonic()  # many requests with long lists take their time
            try:
                self._engine.add(*request)
            except Exception:
                for before in requests[:i]:
                    self._engine.abort(before.request_id)
                raise

    def _explain(self, request_ids: Iterable[str]) -> list[Explanation]:
        found = map(self._engine.explain, request_ids)  # copies: the engine goes on with its own
        return [one for one in found if one is not None]

    def _on_loop(self, call: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the loop is closed: nobody is left to hear it
            self._closing = True


def _settle(future: "asyncio.Future[T]", result: T) -> None:
    if not future.done():  # otherwise the one who waited has gone
        future.set_result(result)


def _fail(future: "asyncio.Future[T]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
