"""Asyncio client of an engine at the other end of a socket, with restarts of that engine.

After a crash another engine is started. It gets all open requests again, with the tokens delivered so far (`Ledger`).
A request that crashes one engine after the other is found by bisection and fails alone (`Suspects`). Requests and
outputs are token ids.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self

from quire.core.explanation import Explanation
from quire.core.output import Output
from quire.core.request import nth_seed
from quire.engine.engine import EngineStats, Learnt
from quire.engine.inputs import NewRequest
from quire.errors import EngineStopped, QueueFull, QuireError, RequestError
from quire.params import is_unicode
from quire.supervisor import protocol
from quire.supervisor.connection import Connection
from quire.supervisor.crash_isolation import GivenUp, Suspects
from quire.supervisor.health import FAILED_STEPS, STALL_SECONDS, Health, State, Tally, Vitals
from quire.supervisor.launcher import Host, Keeper
from quire.supervisor.open_requests import Ledger, StepsInFlight
from quire.supervisor.pending_calls import Questions
from quire.supervisor.protocol import Answer, BadFrame, Batch, News


class Stream:
    """Async iterator over the outputs of a group of requests. Must be closed; this aborts unfinished requests."""

    def __init__(self, close: Callable[[], None]) -> None:
        self.close = close
        self._outputs: list[Output] = []
        self._error: QuireError | None = None
        self._ready = asyncio.Event()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Output]:
        """The new outputs, at least one. Raises EngineStopped when the engine has stopped. Never stops iteration."""
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
        """Add an output. To be called on the event loop."""
        self._outputs.append(output)
        self._ready.set()

    def fail(self, error: QuireError) -> None:
        """End the stream with an error after the outputs so far. To be called on the event loop."""
        self._error = error
        self._ready.set()


log = logging.getLogger(__name__)

WATCH_SECONDS = 0.25
MAX_ASKED = 4096  # the most pending calls
_RESTART_SECONDS = 5.0  # Retry-After of requests beyond MAX_ASKED
_IN_VAIN = 24  # restarts in a row without a committed step, after which the engine stops; bisection needs fewer
_DEADLY = "the engine died whenever this request was computed; it is not tried again"
_LAST_WORDS = 0.5  # seconds that a stalled engine has for writing its stacks
_SHORT_LIFE = 5.0  # seconds; an idle engine that dies sooner counts for _IN_VAIN


class AsyncEngine:
    """The engine of a server, across restarts. All methods must be called on the event loop of `start`.

    host: the engine process or thread, already launched. watchdog: seconds that an engine may be stalled before it is
    restarted; 0 means no limit.
    """

    def __init__(self, host: Host, *, watchdog: float = 0.0) -> None:
        self._host = host
        self._keeper = Keeper(host)
        self._watchdog = watchdog
        self._streams: dict[str, Stream] = {}
        self._ledger = Ledger()
        self._suspects = Suspects()
        self._resumed: set[str] = set()  # open requests that the current engine has
        self._questions = Questions()
        self._given_up = GivenUp()
        self._num_requests = 0
        self._stopped: EngineStopped | None = EngineStopped("the engine has not been started")
        self._connection: Connection | None = None
        self._vitals = Vitals(time.monotonic())
        self._tally = Tally(EngineStats.nothing())
        self._steps = StepsInFlight()
        self._stalled = 0.0  # seconds; 0 while the engine makes progress
        self._num_restarts = self._in_vain = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Connect to the engine that the host has launched, and start the watchdog."""
        self._stopped = None
        await self._connect()
        self._spawn(self._watch())

    async def close(self) -> None:
        """End the engine after its current step, or kill it if the step takes long. Open streams fail."""
        if self._stopped is None:
            self._stop(EngineStopped("the server is shutting down"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._connection is not None:
            self._connection.send(protocol.Close())
            self._connection.close()
            self._connection = None
            await self._keeper.ended()
        await self._keeper.abandon()

    async def generate(self, requests: Sequence[NewRequest]) -> Stream:
        """Queue requests, all or none. Raises RequestError if one cannot be served, and EngineStopped."""
        self._check_running()
        ids = [request.request_id for request in requests]
        if any(request_id in self._streams for request_id in ids):
            raise RequestError("a request id is in use; choose another", "request_id")
        if not all(map(is_unicode, ids)):
            raise RequestError("a request id must be valid Unicode", "request_id")
        if any(request in self._given_up for request in requests):
            raise RequestError(_DEADLY)
        requests = [self._seeded(request) for request in requests]
        stream = Stream(partial(self._give_up, ids))
        self._streams.update(dict.fromkeys(ids, stream))
        try:
            await self._ask(lambda number: protocol.Add(number, requests), requests)
        except BaseException:  # also when the caller is cancelled
            stream.close()
            raise
        return stream

    def finish(self, request_id: str, index: int, num_tokens: int) -> None:
        """End a sequence at a stop string, after `num_tokens` output tokens."""
        seq_id = self._ledger.finish(request_id, index, num_tokens)
        if seq_id is not None:
            self._send(protocol.Finish(seq_id, num_tokens))
        elif request_id not in self._ledger:  # the engine may have the request although it sent no output yet
            self._send(protocol.Abort([request_id]))
        self._look_at(request_id)

    def end_program(self, tenant: str, program: str, branch: str | None = None) -> None:
        """End a branch of a program (None: all branches): no request will continue from it.

        Has no effect during a restart, because a new engine has no KV.
        """
        self._send(protocol.EndProgram(tenant, program, branch))

    async def explain(self, request_ids: Iterable[str]) -> list[Explanation]:
        """Explanations of requests, without those that are unknown or ended too long ago. Raises EngineStopped."""
        ids = list(request_ids)
        found: list[Explanation] = await self._ask(lambda number: protocol.Explain(number, ids))
        return found

    async def flush_cache(self) -> int:
        """Evict cached KV that no running request uses. Returns the number of freed blocks. Raises EngineStopped."""
        freed: int = await self._ask(protocol.Flush)
        return freed

    async def learnt(self) -> Learnt | None:
        """Figures of the cost model and of block use; None if the engine does not answer within STALL_SECONDS."""
        try:
            learnt: Learnt = await asyncio.wait_for(self._ask(protocol.AskLearnt), STALL_SECONDS)
        except (EngineStopped, TimeoutError):
            return None
        return learnt

    def health(self) -> Health:
        """The health of the engine as seen by the front end."""
        state, problem = self._state()
        vitals = self._vitals
        age = time.monotonic() - vitals.heard
        return Health(problem, state, age, self._tally.stats, vitals.predicted_seconds, self._num_restarts)

    def _state(self) -> tuple[State, str]:
        if self._stopped is not None:
            return "stopped", str(self._stopped)
        if self._connection is None:
            return "restarting", "the engine ended and is started again; what was accepted goes on then"
        if self._stalled:
            return "stalled", "the engine has not moved for longer than its step should take"
        if self._tally.stats.failed_in_a_row >= FAILED_STEPS:
            return "ok", f"the last {FAILED_STEPS} steps failed; the log says why"
        return "ok", ""

    def _seeded(self, request: NewRequest) -> NewRequest:
        """The request with a seed, because another engine that continues it needs the same seed."""
        self._num_requests += 1
        if request.params.seed is not None:
            return request
        seed = nth_seed(self._host.facts.options.seed, self._num_requests - 1)
        return request._replace(params=request.params.changed(seed=seed))

    def _give_up(self, ids: Sequence[str]) -> None:
        known = [request_id for request_id in ids if self._streams.pop(request_id, None) is not None]
        for request_id in known:
            self._ledger.drop(request_id)
        if known:  # the engine ignores a request that has ended
            self._send(protocol.Abort(known))
        for request_id in known:
            self._look_at(request_id)

    def _look_at(self, request_id: str) -> None:
        """If a request has ended, remove it from the bisection, and submit the requests that it held back."""
        if request_id in self._ledger:
            return
        self._resumed.discard(request_id)
        if self._suspects.watching:
            self._suspects.forget(request_id)
            if self._connection is not None:
                self._submit()

    # Pending calls

    async def _ask(self, command: Callable[[int], Any], requests: Sequence[NewRequest] = ()) -> Any:  # noqa: ANN401
        """Send a command, and return the engine's answer, which it gives between two steps.

        Raises the engine's error, QueueFull beyond MAX_ASKED pending calls, and EngineStopped.
        """
        self._check_running()
        if len(self._questions) >= MAX_ASKED:
            raise QueueFull("too many requests wait for the engine; try again later", _RESTART_SECONDS)
        number, question = self._questions.put(command, requests)
        self._ask_on()
        try:
            return await question.answer
        finally:
            self._questions.take(number)

    def _ask_on(self) -> None:
        """Send the pending calls that may be sent now."""
        if self._connection is None:
            return
        for number, question in self._questions.to_send(adding=self._suspects.trying is None):
            try:
                self._send(question.command(number))
                question.sent = True
            except BadFrame as error:
                wrong = f"this is more than can be handed to the engine: {error}; ask for less at once"
                question.answer.set_exception(RequestError(wrong))

    def _answered(self, answer: Answer) -> None:
        question = self._questions.take(answer.number)
        if question is not None and question.was_there:
            self._ask_on()  # such calls are sent one at a time
        if question is None or question.answer.done():  # the caller was cancelled and has aborted its requests
            return
        if answer.failure is not None:
            question.answer.set_exception(protocol.error_of(answer.failure))
            return
        self._resumed.update(request.request_id for request in question.requests)
        self._ledger.add(question.requests)
        question.answer.set_result(answer.result)

    # The current engine

    async def _connect(self) -> None:
        """Connect to a launched engine, and submit all open requests to it."""
        self._vitals = Vitals(time.monotonic())
        self._steps, self._stalled = StepsInFlight(), 0.0
        self._resumed.clear()
        self._questions.restart()
        self._connection = connection = Connection(self._hear, self._lost)
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=self._host.connection)
        await connection.heard.wait()
        if connection is self._connection:  # otherwise this engine has died meanwhile
            self._submit()

    def _submit(self) -> None:
        """Submit the open requests that the engine does not have: during bisection only those of the current group."""
        trying = self._suspects.trying
        for request_id in list(self._ledger) if trying is None else trying:
            if request_id not in self._resumed and request_id in self._ledger:
                self._resumed.add(request_id)
                self._resubmit(request_id)
        self._ask_on()

    def _resubmit(self, request_id: str) -> None:
        request = self._ledger.resume(request_id)
        _, question = self._questions.put(lambda number: protocol.Add(number, [request]), lasts=False)
        question.answer.add_done_callback(partial(self._resubmitted, request_id))

    def _resubmitted(self, request_id: str, answer: "asyncio.Future[Any]") -> None:
        error = None if answer.cancelled() else answer.exception()
        if error is not None and self._stopped is None and request_id in self._ledger:
            log.error("request %s could not be taken up again: %s", request_id, error)
            self._fail(request_id, str(error))

    def _send(self, command: Any) -> None:  # noqa: ANN401  (one of protocol.Commands)
        if self._connection is not None:
            self._connection.send(command)

    def _hear(self, news: News) -> None:
        now = time.monotonic()
        match news:
            case Batch():
                self._take(news, now)
            case protocol.Pulse(turned):
                self._vitals.pulse(turned, now)

    def _take(self, batch: Batch, now: float) -> None:
        self._tally.take(batch.stats)
        self._committed(batch.num_steps)
        for answer in batch.answers:
            self._answered(answer)
        for output in batch.outputs:
            self._deliver(output)
        if batch.launched is None:
            self._vitals.idles(now)
        else:
            self._steps.launched(batch.launched)
            self._vitals.launched(batch.launched.predicted_seconds, now, waits=len(self._steps) > 1)

    def _deliver(self, output: Output) -> None:
        told, stopped_after = self._ledger.take(output)
        if stopped_after is not None:
            self._send(protocol.Finish(output.seq_id, stopped_after))
        stream = self._streams.get(output.request_id)
        if told is not None and stream is not None:
            stream.put(told)
        self._look_at(output.request_id)

    def _committed(self, num_steps: int) -> None:
        for rows in self._steps.committed(num_steps):
            if self._suspects.watching:
                for name, position in rows.items():
                    self._suspects.survived(name, position)
                self._submit()

    # Crash, restart, watchdog

    def _lost(self, connection: Connection, why: Exception | None) -> None:
        if connection is self._connection and self._stopped is None:
            self._connection = None
            self._spawn(self._recover(why))

    async def _recover(self, why: Exception | None) -> None:
        """After the end of an engine: record its in-flight requests as suspects, and start another engine.

        why: the error in its messages, or None.
        """
        if why is not None:  # a message could not be read
            log.error("the engine is ended: %s", why)
            self._host.kill()
        lived = time.monotonic() - self._vitals.began
        how = await self._keeper.ended()
        rows, num_gone = self._steps.at_death(self._ledger)
        log.error("the engine ended %s, with %d requests in its last step", how, len(rows))
        if not self._host.can_restart:
            self._stop(EngineStopped(f"the engine failed: it ended {how}, and its log says why"))
            return
        in_vain = self._steps.num_committed == 0 and (self._ledger or self._questions or lived < _SHORT_LIFE)
        self._in_vain = self._in_vain + 1 if in_vain else 0
        self._blame(rows, num_gone)
        self._tally.died(len(self._ledger))
        if self._in_vain > _IN_VAIN:
            self._stop(EngineStopped(f"{self._in_vain} engines died one after the other without doing anything"))
            return
        if await self._keeper.launch():
            self._num_restarts += 1
            await self._connect()
        else:
            self._stop(EngineStopped("the engine could not be started again, and the log says why"))  # text for clients

    def _blame(self, rows: dict[str, int], num_gone: int) -> None:
        culprit = self._suspects.died(rows, num_gone)
        if culprit is not None:
            log.error("request %s is given up: the engine died whenever it was computed", culprit)
            self._given_up.add(self._ledger.request(culprit))
            self._fail(culprit, _DEADLY)
        if not rows and not self._steps.num_committed:
            for question in self._questions.died():
                if not question.answer.done():
                    question.answer.set_exception(RequestError(_DEADLY))

    def _fail(self, request_id: str, error: str) -> None:
        outputs = self._ledger.fail(request_id, error)
        stream = self._streams.get(request_id)
        for output in outputs if stream is not None else ():
            stream.put(output)  # type: ignore[union-attr]  # it is not None
        self._look_at(request_id)

    async def _watch(self) -> None:
        """The watchdog loop: update `_stalled`, and kill an engine that is stalled for too long."""
        while True:
            asleep = time.monotonic()
            await asyncio.sleep(WATCH_SECONDS)
            now = time.monotonic()
            if self._connection is None or now - asleep > 2 * WATCH_SECONDS:
                self._stalled = 0.0  # after a delay of the event loop, heartbeats may be unread
                continue
            self._stalled = self._vitals.stalled(now)
            if self._host.can_restart and 0 < self._watchdog < self._stalled:
                log.error("the engine has been stalled for %.1f s and is ended", self._stalled)
                stalled = self._connection
                self._host.dump_stacks()
                await asyncio.sleep(_LAST_WORDS)
                if self._connection is stalled:  # otherwise it has died, and the host has another engine
                    self._host.kill()
                await asyncio.sleep(_LAST_WORDS)

    def _check_running(self) -> None:
        if self._stopped is not None:
            raise self._stopped

    def _stop(self, reason: EngineStopped) -> None:
        self._stopped = reason
        for stream in set(self._streams.values()):
            stream.fail(reason)
        self._questions.fail(reason)

    def _spawn(self, work: Any) -> None:  # noqa: ANN401  (a coroutine)
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and self._stopped is None:  # without this task requests would wait forever
            log.error("the engine cannot be watched any more", exc_info=error)
            self._stop(EngineStopped("the server failed to watch its engine, and its log says why"))
