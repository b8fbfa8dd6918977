"""Asyncio client of an engine at the other end of a socket, with restarts of that engine.

After a crash another engine is started. It gets all open requests again, with the tokens delivered so far
(`OpenRequests`). A request that crashes one engine after the other is found by bisection and fails alone
(`CrashBisection`). Requests and outputs are token ids.
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
from quire.engine.engine import CostModelStats, EngineStats
from quire.engine.inputs import NewRequest
from quire.errors import EngineStopped, QueueFull, QuireError, RequestError
from quire.params import is_unicode
from quire.supervisor import protocol
from quire.supervisor.connection import Connection
from quire.supervisor.crash_isolation import CrashBisection, Denylist
from quire.supervisor.health import FAILED_STEPS, STALL_SECONDS, CumulativeStats, Health, StallDetector, State
from quire.supervisor.launcher import EngineHandle, Launcher
from quire.supervisor.open_requests import OpenRequests, StepsInFlight
from quire.supervisor.pending_calls import PendingCalls
from quire.supervisor.protocol import Answer, BadFrame, Batch, EngineMessage


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

WATCHDOG_INTERVAL = 0.25
MAX_PENDING_CALLS = 4096  # the most pending calls
_RETRY_AFTER_SECONDS = 5.0  # Retry-After of requests beyond MAX_PENDING_CALLS
_MAX_RESTARTS_WITHOUT_STEP = (
    24  # restarts in a row without a committed step, after which the engine stops; bisection needs fewer
)
_CRASH_MESSAGE = "the engine crashed each time that it computed this request; it is not tried again"
_STACK_DUMP_SECONDS = 0.5  # seconds that a stalled engine has for writing its stacks
_MIN_LIFETIME_SECONDS = 5.0  # seconds; an idle engine that dies sooner counts for _MAX_RESTARTS_WITHOUT_STEP


class AsyncEngine:
    """The engine of a server, across restarts. All methods must be called on the event loop of `start`.

    engine_handle: the engine process or thread, already launched. watchdog: seconds that an engine may be stalled
    before it is restarted; 0 means no limit.
    """

    def __init__(self, engine_handle: EngineHandle, *, watchdog: float = 0.0) -> None:
        self._engine_handle = engine_handle
        self._launcher = Launcher(engine_handle)
        self._watchdog = watchdog
        self._streams: dict[str, Stream] = {}
        self._open_requests = OpenRequests()
        self._bisection = CrashBisection()
        self._submitted_ids: set[str] = set()  # open requests that the current engine has
        self._pending_calls = PendingCalls()
        self._denylist = Denylist()
        self._num_requests = 0
        self._stopped: EngineStopped | None = EngineStopped("the engine has not been started")
        self._connection: Connection | None = None
        self._stall_detector = StallDetector(time.monotonic())
        self._cumulative_stats = CumulativeStats(EngineStats.zero())
        self._steps = StepsInFlight()
        self._stalled_seconds = 0.0  # seconds; 0 while the engine makes progress
        self._num_restarts = self._num_restarts_without_step = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Connect to the engine that the engine handle has launched, and start the watchdog."""
        self._stopped = None
        await self._connect()
        self._spawn(self._run_watchdog())

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
            await self._launcher.wait_ended()
        await self._launcher.abandon()

    async def generate(self, requests: Sequence[NewRequest]) -> Stream:
        """Queue requests, all or none. Raises RequestError if one cannot be served, and EngineStopped."""
        self._check_running()
        ids = [request.request_id for request in requests]
        if any(request_id in self._streams for request_id in ids):
            raise RequestError("a request id is in use; choose another", "request_id")
        if not all(map(is_unicode, ids)):
            raise RequestError("a request id must be valid Unicode", "request_id")
        if any(request in self._denylist for request in requests):
            raise RequestError(_CRASH_MESSAGE)
        requests = [self._seeded(request) for request in requests]
        stream = Stream(partial(self._abort, ids))
        self._streams.update(dict.fromkeys(ids, stream))
        try:
            await self._call(lambda number: protocol.Add(number, requests), requests)
        except BaseException:  # also when the caller is cancelled
            stream.close()
            raise
        return stream

    def finish(self, request_id: str, index: int, num_tokens: int) -> None:
        """End a sequence at a stop string, after `num_tokens` output tokens."""
        seq_id = self._open_requests.finish(request_id, index, num_tokens)
        if seq_id is not None:
            self._send(protocol.Finish(seq_id, num_tokens))
        elif request_id not in self._open_requests:  # the engine may have the request although it sent no output yet
            self._send(protocol.Abort([request_id]))
        self._release_if_ended(request_id)

    def end_program(self, tenant: str, program: str, branch: str | None = None) -> None:
        """End a branch of a program (None: all branches): no request will continue from it.

        Has no effect during a restart, because a new engine has no KV.
        """
        self._send(protocol.EndProgram(tenant, program, branch))

    async def explain(self, request_ids: Iterable[str]) -> list[Explanation]:
        """Explanations of requests, without those that are unknown or ended too long ago. Raises EngineStopped."""
        ids = list(request_ids)
        found: list[Explanation] = await self._call(lambda number: protocol.Explain(number, ids))
        return found

    async def flush_cache(self) -> int:
        """Evict cached KV that no running request uses. Returns the number of freed blocks. Raises EngineStopped."""
        freed: int = await self._call(protocol.Flush)
        return freed

    async def cost_model_stats(self) -> CostModelStats | None:
        """Figures of the cost model and of block use; None if the engine does not answer within STALL_SECONDS."""
        try:
            learnt: CostModelStats = await asyncio.wait_for(self._call(protocol.AskLearnt), STALL_SECONDS)
        except (EngineStopped, TimeoutError):
            return None
        return learnt

    def health(self) -> Health:
        """The health of the engine as seen by the front end."""
        state, problem = self._state()
        detector = self._stall_detector
        age = time.monotonic() - detector.last_message_at
        return Health(problem, state, age, self._cumulative_stats.stats, detector.predicted_seconds, self._num_restarts)

    def _state(self) -> tuple[State, str]:
        if self._stopped is not None:
            return "stopped", str(self._stopped)
        if self._connection is None:
            return "restarting", "the engine ended and is being restarted; accepted requests continue afterwards"
        if self._stalled_seconds:
            return "stalled", "the engine has made no progress for longer than its step should take"
        if self._cumulative_stats.stats.failed_in_a_row >= FAILED_STEPS:
            return "ok", f"the last {FAILED_STEPS} steps failed; see the log for the cause"
        return "ok", ""

    def _seeded(self, request: NewRequest) -> NewRequest:
        """The request with a seed, because another engine that continues it needs the same seed."""
        self._num_requests += 1
        if request.params.seed is not None:
            return request
        seed = nth_seed(self._engine_handle.model_info.options.seed, self._num_requests - 1)
        return request._replace(params=request.params.changed(seed=seed))

    def _abort(self, ids: Sequence[str]) -> None:
        known = [request_id for request_id in ids if self._streams.pop(request_id, None) is not None]
        for request_id in known:
            self._open_requests.remove(request_id)
        if known:  # the engine ignores a request that has ended
            self._send(protocol.Abort(known))
        for request_id in known:
            self._release_if_ended(request_id)

    def _release_if_ended(self, request_id: str) -> None:
        """If a request has ended, remove it from the bisection, and submit the requests that it held back."""
        if request_id in self._open_requests:
            return
        self._submitted_ids.discard(request_id)
        if self._bisection.has_suspects:
            self._bisection.forget(request_id)
            if self._connection is not None:
                self._submit()

    # Pending calls

    async def _call(self, command: Callable[[int], Any], requests: Sequence[NewRequest] = ()) -> Any:  # noqa: ANN401
        """Send a command, and return the engine's answer, which it gives between two steps.

        Raises the engine's error, QueueFull beyond MAX_PENDING_CALLS pending calls, and EngineStopped.
        """
        self._check_running()
        if len(self._pending_calls) >= MAX_PENDING_CALLS:
            raise QueueFull("too many requests wait for the engine; try again later", _RETRY_AFTER_SECONDS)
        number, call = self._pending_calls.add(command, requests)
        self._send_pending_calls()
        try:
            return await call.answer
        finally:
            self._pending_calls.pop(number)

    def _send_pending_calls(self) -> None:
        """Send the pending calls that may be sent now."""
        if self._connection is None:
            return
        for number, call in self._pending_calls.to_send(allow_adds=self._bisection.current_group is None):
            try:
                self._send(call.command(number))
                call.sent = True
            except BadFrame as error:
                wrong = f"the request is too large for a message to the engine: {error}; send less at once"
                call.answer.set_exception(RequestError(wrong))

    def _on_answer(self, answer: Answer) -> None:
        call = self._pending_calls.pop(answer.number)
        if call is not None and call.was_pending_at_crash:
            self._send_pending_calls()  # such calls are sent one at a time
        if call is None or call.answer.done():  # the caller was cancelled and has aborted its requests
            return
        if answer.failure is not None:
            call.answer.set_exception(protocol.decode_error(answer.failure))
            return
        self._submitted_ids.update(request.request_id for request in call.requests)
        self._open_requests.add(call.requests)
        call.answer.set_result(answer.result)

    # The current engine

    async def _connect(self) -> None:
        """Connect to a launched engine, and submit all open requests to it."""
        self._stall_detector = StallDetector(time.monotonic())
        self._steps, self._stalled_seconds = StepsInFlight(), 0.0
        self._submitted_ids.clear()
        self._pending_calls.mark_unsent()
        self._connection = connection = Connection(self._on_message, self._on_lost)
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=self._engine_handle.connection)
        await connection.first_message.wait()
        if connection is self._connection:  # otherwise this engine has died meanwhile
            self._submit()

    def _submit(self) -> None:
        """Submit the open requests that the engine does not have: during bisection only those of the current group."""
        trying = self._bisection.current_group
        for request_id in list(self._open_requests) if trying is None else trying:
            if request_id not in self._submitted_ids and request_id in self._open_requests:
                self._submitted_ids.add(request_id)
                self._resubmit(request_id)
        self._send_pending_calls()

    def _resubmit(self, request_id: str) -> None:
        request = self._open_requests.resume(request_id)
        _, call = self._pending_calls.add(lambda number: protocol.Add(number, [request]), resend=False)
        call.answer.add_done_callback(partial(self._on_resubmitted, request_id))

    def _on_resubmitted(self, request_id: str, answer: "asyncio.Future[Any]") -> None:
        error = None if answer.cancelled() else answer.exception()
        if error is not None and self._stopped is None and request_id in self._open_requests:
            log.error("request %s could not be resumed: %s", request_id, error)
            self._fail(request_id, str(error))

    def _send(self, command: Any) -> None:  # noqa: ANN401  (one of protocol.Commands)
        if self._connection is not None:
            self._connection.send(command)

    def _on_message(self, message: EngineMessage) -> None:
        now = time.monotonic()
        match message:
            case Batch():
                self._on_batch(message, now)
            case protocol.Pulse(turned):
                self._stall_detector.record_heartbeat(turned, now)

    def _on_batch(self, batch: Batch, now: float) -> None:
        self._cumulative_stats.update(batch.stats)
        self._on_commit(batch.num_steps)
        for answer in batch.answers:
            self._on_answer(answer)
        for output in batch.outputs:
            self._deliver(output)
        if batch.launched is None:
            self._stall_detector.record_idle(now)
        else:
            self._steps.record_launch(batch.launched)
            self._stall_detector.record_launch(batch.launched.predicted_seconds, now, is_queued=len(self._steps) > 1)

    def _deliver(self, output: Output) -> None:
        delivered, stopped_after = self._open_requests.record_output(output)
        if stopped_after is not None:
            self._send(protocol.Finish(output.seq_id, stopped_after))
        stream = self._streams.get(output.request_id)
        if delivered is not None and stream is not None:
            stream.put(delivered)
        self._release_if_ended(output.request_id)

    def _on_commit(self, num_steps: int) -> None:
        for rows in self._steps.record_commits(num_steps):
            if self._bisection.has_suspects:
                for name, position in rows.items():
                    self._bisection.record_progress(name, position)
                self._submit()

    # Crash, restart, watchdog

    def _on_lost(self, connection: Connection, why: Exception | None) -> None:
        if connection is self._connection and self._stopped is None:
            self._connection = None
            self._spawn(self._recover(why))

    async def _recover(self, why: Exception | None) -> None:
        """After the end of an engine: record its in-flight requests as suspects, and start another engine.

        why: the error in its messages, or None.
        """
        if why is not None:  # a message could not be read
            log.error("ending the engine: %s", why)
            self._engine_handle.kill()
        lifetime = time.monotonic() - self._stall_detector.connected_at
        how = await self._launcher.wait_ended()
        rows, num_gone = self._steps.at_crash(self._open_requests)
        log.error("the engine ended %s, with %d requests in its last step", how, len(rows))
        if not self._engine_handle.can_restart:
            self._stop(EngineStopped(f"the engine failed: it ended {how}; see its log for the cause"))
            return
        in_vain = self._steps.num_committed == 0 and (
            self._open_requests or self._pending_calls or lifetime < _MIN_LIFETIME_SECONDS
        )
        self._num_restarts_without_step = self._num_restarts_without_step + 1 if in_vain else 0
        self._record_crash(rows, num_gone)
        self._cumulative_stats.engine_ended(len(self._open_requests))
        if self._num_restarts_without_step > _MAX_RESTARTS_WITHOUT_STEP:
            self._stop(
                EngineStopped(
                    f"{self._num_restarts_without_step} engines in a row crashed before they committed a step"
                )
            )
            return
        if await self._launcher.launch():
            self._num_restarts += 1
            await self._connect()
        else:
            self._stop(EngineStopped("the engine could not be restarted; see the log for the cause"))

    def _record_crash(self, rows: dict[str, int], num_gone: int) -> None:
        culprit = self._bisection.record_crash(rows, num_gone)
        if culprit is not None:
            log.error("request %s fails: the engine crashed each time that it computed it", culprit)
            self._denylist.add(self._open_requests.request(culprit))
            self._fail(culprit, _CRASH_MESSAGE)
        if not rows and not self._steps.num_committed:
            for call in self._pending_calls.record_crash():
                if not call.answer.done():
                    call.answer.set_exception(RequestError(_CRASH_MESSAGE))

    def _fail(self, request_id: str, error: str) -> None:
        outputs = self._open_requests.fail(request_id, error)
        stream = self._streams.get(request_id)
        for output in outputs if stream is not None else ():
            stream.put(output)  # type: ignore[union-attr]  # it is not None
        self._release_if_ended(request_id)

    async def _run_watchdog(self) -> None:
        """The watchdog loop: update `_stalled_seconds`, and kill an engine that is stalled for too long."""
        while True:
            asleep = time.monotonic()
            await asyncio.sleep(WATCHDOG_INTERVAL)
            now = time.monotonic()
            if self._connection is None or now - asleep > 2 * WATCHDOG_INTERVAL:
                self._stalled_seconds = 0.0  # after a delay of the event loop, heartbeats may be unread
                continue
            self._stalled_seconds = self._stall_detector.stalled_seconds(now)
            if self._engine_handle.can_restart and 0 < self._watchdog < self._stalled_seconds:
                log.error("the engine has been stalled for %.1f s and is killed", self._stalled_seconds)
                stalled = self._connection
                self._engine_handle.dump_stacks()
                await asyncio.sleep(_STACK_DUMP_SECONDS)
                if self._connection is stalled:  # otherwise it has died, and another engine runs
                    self._engine_handle.kill()
                await asyncio.sleep(_STACK_DUMP_SECONDS)

    def _check_running(self) -> None:
        if self._stopped is not None:
            raise self._stopped

    def _stop(self, reason: EngineStopped) -> None:
        self._stopped = reason
        for stream in set(self._streams.values()):
            stream.fail(reason)
        self._pending_calls.fail(reason)

    def _spawn(self, work: Any) -> None:  # noqa: ANN401  (a coroutine)
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and self._stopped is None:  # without this task requests would wait forever
            log.error("the connection to the engine failed", exc_info=error)
            self._stop(EngineStopped("a task that supervises the engine failed; see the log of the server"))
