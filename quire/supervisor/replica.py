"""A replica: one engine across restarts. Connects to it, watches it, and starts another one when it ends.

    starting, restarting -> serving <-> stalled
    starting, serving, stalled -> restarting
    any state -> failed, closed

`RestartPolicy` decides when the next engine is started. In the states failed and closed no engine is started any more,
and `error` says why. The requests belong to the `ReplicaOwner`, which submits them to each new engine or elsewhere.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from quire.engine.engine import EngineStats
from quire.errors import EngineStopped
from quire.supervisor import protocol
from quire.supervisor.connection import Connection
from quire.supervisor.engine_handle import EngineHandle
from quire.supervisor.health import FAILED_STEPS, CumulativeStats, Health, StallDetector, State
from quire.supervisor.protocol import Batch, EngineMessage
from quire.supervisor.restart_policy import RestartPolicy
from quire.supervisor.steps_in_flight import StepsInFlight

T = TypeVar("T")

log = logging.getLogger(__name__)

WATCHDOG_INTERVAL = 0.25  # seconds

_STACK_DUMP_SECONDS = 0.5  # time for a stalled engine to write its stacks
_END_SECONDS = 5.0  # time for an engine to end after its connection is closed, before it is killed
_KILL_INTERVAL = 0.25  # seconds between two kills of an engine that is starting: its process may not exist at the first


class EndedWork(NamedTuple):
    """What an engine that ended had to do."""

    was_open: bool  # whether requests or calls were open
    found_culprit: bool  # whether one of them is found to crash engines, and has failed


class ReplicaOwner(Protocol):
    """What a replica calls, on its event loop."""

    def on_engine_started(self) -> None:
        """Another engine accepts commands. It has no requests yet."""

    def on_batch(self, batch: Batch, committed: list[dict[str, int]]) -> None:
        """The engine sent a batch. committed: its newly committed steps, oldest first, as in StepsInFlight."""

    def on_engine_ended(self, steps: StepsInFlight, *, was_killed: bool) -> EndedWork:
        """The engine ended, with these steps in flight.

        was_killed: by SIGKILL, of another process or because it was stalled, or on request. Otherwise its own work may
        have ended it.
        """

    def on_stopped(self, error: EngineStopped) -> None:
        """No engine will be started any more."""


class Replica:
    """Keeps one engine serving. All methods must be called on one event loop.

    engine_handle: the engine process or thread, already launched. watchdog: seconds that an engine may be stalled
    before it is killed and replaced; 0 means no limit. restart_timeout: seconds without a serving engine after which
    the state is failed; 0 means no limit. number: of the replica, for the log; None for the only one.
    """

    def __init__(
        self,
        engine_handle: EngineHandle,
        owner: ReplicaOwner,
        *,
        watchdog: float,
        restart_timeout: float,
        number: int | None = None,
    ) -> None:
        self.engine_handle = engine_handle
        self._name = "the engine" if number is None else f"engine {number}"
        # why requests are refused; None: they are accepted
        self.error: EngineStopped | None = EngineStopped("the engine has not been started")
        self._owner = owner
        self._watchdog = watchdog
        self._restart_timeout = restart_timeout
        self._policy = RestartPolicy(restart_timeout, time.monotonic())
        self._state = State.STARTING
        self._connection: Connection | None = None  # None while no engine is connected
        self._connection_ended: asyncio.Future[Exception | None]
        self._steps = StepsInFlight()  # of the current engine
        self._stall_detector = StallDetector(time.monotonic())
        self._cumulative_stats = CumulativeStats(EngineStats.zero())
        self._num_restarts = 0
        self._start_error = ""  # of the last failed start; empty after a start that succeeded
        self._restarted: asyncio.Future[None] | None = None  # done when the engine after a requested restart serves
        self._ends_on_request = False  # whether a restart of the current engine was requested
        self._tasks: set[asyncio.Task[None]] = set()
        # of its own: a start and a wait block for long, and the threads of asyncio are few
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-replica")

    @property
    def has_engine(self) -> bool:
        """Whether commands reach an engine."""
        return self._connection is not None

    @property
    def is_serving(self) -> bool:
        """Whether an engine accepts requests and makes progress."""
        return self._connection is not None and self._state is State.SERVING

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that the engine neither uses for a running sequence nor keeps in its prefix cache."""
        stats = self._cumulative_stats.stats
        return stats.kv_blocks_total - stats.kv_blocks_used - stats.kv_blocks_cached

    @property
    def num_steps(self) -> int:
        """Steps of all engines so far."""
        return self._cumulative_stats.stats.num_steps

    @property
    def failure(self) -> EngineStopped | None:
        """Why the state is failed; None in all other states."""
        return self.error if self._state is State.FAILED else None

    def send(self, command: Any) -> None:  # noqa: ANN401  (one of protocol.Commands)
        """Send a command to the engine, if there is one. Raises BadFrame for an invalid command."""
        if self._connection is not None:
            self._connection.send(command)

    def health(self, num_open: int) -> Health:
        """The health of the engine. num_open: number of open requests, which wait while there is no engine."""
        stats, age, predicted = self._cumulative_stats.stats, None, None
        if self._state in (State.SERVING, State.STALLED):
            age = time.monotonic() - self._stall_detector.last_message_at
            predicted = self._stall_detector.predicted_seconds
        else:
            stats = msgspec.structs.replace(stats, num_waiting=num_open)
        return Health(self._problem(), self._state, stats, age, predicted, self._num_restarts, self._start_error)

    def _problem(self) -> str:
        match self._state:
            case State.FAILED | State.CLOSED:
                return str(self.error)
            case State.STARTING:
                return "the engine is starting"
            case State.RESTARTING:
                return "the engine ended and is being restarted; accepted requests continue afterwards"
            case State.STALLED:
                return "the engine has made no progress for longer than its step should take"
        if self._cumulative_stats.stats.failed_in_a_row >= FAILED_STEPS:
            return f"the last {FAILED_STEPS} steps failed; see the log for the cause"
        return ""

    async def start(self) -> None:
        """Connect to the engine that the engine handle has launched, and supervise it and its successors."""
        self.error = None
        self._spawn(self._run_watchdog())  # first, because an engine can be stalled before its first message
        await self._connect()
        self._spawn(self._supervise())

    async def close(self) -> None:
        """End the engine after its current step, or kill it if the step takes long."""
        self._stop(State.CLOSED, EngineStopped("the server is shutting down"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._connection is not None:
            self._connection.send(protocol.Close())
            self._connection.close()
            self._connection = None
            await self._wait_ended()
        self._thread.shutdown(wait=False)

    async def restart(self) -> None:
        """End the engine after its current step, and wait until another one serves. Raises EngineStopped.

        An engine that does not end within _END_SECONDS is killed.
        """
        if self.error is not None:
            raise self.error
        if self._restarted is None:
            self._restarted = asyncio.get_running_loop().create_future()
            self._ends_on_request = self._connection is not None
            self.send(protocol.Close())
            self._spawn(self._kill_later(self._connection))
        await asyncio.shield(self._restarted)

    async def _kill_later(self, connection: Connection | None) -> None:
        """Kill the engine of a connection if that has not ended after _END_SECONDS."""
        await asyncio.sleep(_END_SECONDS)
        if connection is not None and connection is self._connection:
            log.error("%s does not end after its step and is killed", self._name)
            self.engine_handle.kill()

    # The current engine

    async def _connect(self) -> None:
        """Connect to a launched engine, and wait for its first message or its end."""
        loop = asyncio.get_running_loop()
        self._steps, self._stall_detector = StepsInFlight(), StallDetector(time.monotonic())
        self._connection_ended = loop.create_future()
        self._connection = connection = Connection(self._on_message, self._on_lost)
        await loop.create_connection(lambda: connection, sock=self.engine_handle.connection)
        await connection.first_message.wait()
        if connection is self._connection and self.error is None:
            self._state, self._start_error = State.SERVING, ""
            self._owner.on_engine_started()
            self._end_restart(None)

    def _on_message(self, message: EngineMessage) -> None:
        now = time.monotonic()
        match message:
            case Batch():
                self._on_batch(message, now)
            case protocol.Pulse(turned):
                self._stall_detector.record_heartbeat(turned, now)

    def _on_batch(self, batch: Batch, now: float) -> None:
        self._cumulative_stats.update(batch.stats)
        self._owner.on_batch(batch, self._steps.record_commits(batch.num_steps))
        if batch.launched is None:
            self._stall_detector.record_idle(now)
        else:
            self._steps.record_launch(batch.launched)
            self._stall_detector.record_launch(batch.launched.predicted_seconds, now, is_queued=len(self._steps) > 1)

    def _on_lost(self, connection: Connection, why: Exception | None) -> None:
        if connection is not self._connection:
            return
        self._connection = None
        if self.error is None:
            self._state = State.RESTARTING
            self._connection_ended.set_result(why)

    # Restarts

    async def _supervise(self) -> None:
        """Replace each engine that ends, until the state is failed."""
        try:
            while True:
                await self._record_end(await self._connection_ended)
                await self._restart()
        except EngineStopped as error:
            log.critical("%s is not started any more: %s", self._name, error)
            self._stop(State.FAILED, error)

    async def _record_end(self, why: Exception | None) -> None:
        """Record that the engine ended. why: the error in its messages, or None. Raises EngineStopped."""
        if why is not None:  # a message could not be read
            log.error("ending %s: %s", self._name, why)
            self.engine_handle.kill()
        lifetime = time.monotonic() - self._stall_detector.connected_at
        how = await self._wait_ended()
        ends_on_request, self._ends_on_request = self._ends_on_request, False
        log.log(logging.INFO if ends_on_request else logging.ERROR, "%s ended %s", self._name, how)
        if not self.engine_handle.can_restart:
            raise EngineStopped(f"the engine failed: it ended {how}; see its log for the cause")
        was_killed = ends_on_request or self.engine_handle.was_killed
        work = self._owner.on_engine_ended(self._steps, was_killed=was_killed)
        self._cumulative_stats.engine_ended()
        if ends_on_request:
            self._policy.record_request(time.monotonic())
            return
        self._policy.record_end(
            time.monotonic(),
            lifetime=lifetime,
            num_committed=self._steps.num_committed,
            had_work=work.was_open,
            found_culprit=work.found_culprit,
        )
        if self._policy.is_crash_loop:
            raise EngineStopped(
                f"{self._policy.num_crashes} engines in a row crashed with requests before they committed a step; "
                "see the log for the cause"
            )

    async def _restart(self) -> None:
        """Start engines until one is connected. Raises EngineStopped after the deadline of the policy."""
        deadline = self._policy.deadline
        seconds = None if deadline is None else deadline - time.monotonic()
        try:
            async with asyncio.timeout(seconds):
                while not await self._launch():
                    pass
                self._num_restarts += 1
                await self._connect()
        except TimeoutError:
            if self._connection is not None:  # the engine has sent no message
                self._connection.close()
                self._connection = None
                self.engine_handle.kill()
                await self._wait_ended()
            raise EngineStopped(
                f"no engine has served for {self._restart_timeout:g} s; see the log of the server for the cause"
            ) from None

    async def _launch(self) -> bool:
        """Launch an engine after the delay of the policy. Returns whether it runs."""
        await asyncio.sleep(self._policy.delay)
        launching = self._on_thread(self.engine_handle.launch)
        try:
            await asyncio.wait({launching})
        except asyncio.CancelledError:
            await self._kill_until_done(launching)
            if launching.exception() is None:
                self.engine_handle.connection.close()
                await self._wait_ended()
            raise
        try:
            launching.result()
        except Exception as error:  # the cause makes no difference: a refusal, no memory, no thread
            self._policy.record_failed_start()
            self._start_error = str(error)
            log.error("%s could not be started: %s; trying again in %.2f s", self._name, error, self._policy.delay)
            return False
        return True

    async def _wait_ended(self) -> str:
        """Wait until the engine has ended; kill it after _END_SECONDS. Returns how it ended."""
        waiting = self._on_thread(self.engine_handle.wait)
        try:
            await asyncio.wait({waiting}, timeout=_END_SECONDS)
        finally:
            await self._kill_until_done(waiting)
        return waiting.result()

    def _on_thread(self, call: Callable[[], T]) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def _kill_until_done(self, call: "asyncio.Future[Any]") -> None:
        """Kill the engine until a call of its handle is done, which runs on a thread and cannot be cancelled.

        A cancellation meanwhile is raised when the call is done.
        """
        cancelled = None
        while not call.done():
            self.engine_handle.kill()
            try:
                await asyncio.wait({call}, timeout=_KILL_INTERVAL)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    # Stalls and the end

    async def _run_watchdog(self) -> None:
        """The watchdog loop: update the state of a connected engine, and kill one that is stalled for too long."""
        while True:
            asleep = time.monotonic()
            await asyncio.sleep(WATCHDOG_INTERVAL)
            now = time.monotonic()
            if self._connection is None:
                continue
            is_late = now - asleep > 2 * WATCHDOG_INTERVAL  # heartbeats may be unread after a delay of the event loop
            stalled_seconds = 0.0 if is_late else self._stall_detector.stalled_seconds(now)
            if self._state in (State.SERVING, State.STALLED):  # otherwise the engine has sent no message yet
                self._state = State.STALLED if stalled_seconds else State.SERVING
            if self.engine_handle.can_restart and 0 < self._watchdog < stalled_seconds:
                log.error("%s has been stalled for %.1f s and is killed", self._name, stalled_seconds)
                stalled = self._connection
                self.engine_handle.dump_stacks()
                await asyncio.sleep(_STACK_DUMP_SECONDS)
                if self._connection is stalled:  # otherwise it has died, and another engine runs
                    self.engine_handle.kill()
                await asyncio.sleep(_STACK_DUMP_SECONDS)

    def _stop(self, state: State, error: EngineStopped) -> None:
        if self._state not in (State.FAILED, State.CLOSED):
            self._state, self.error = state, error
            self._owner.on_stopped(error)
            self._end_restart(error)

    def _end_restart(self, error: EngineStopped | None) -> None:
        restarted, self._restarted = self._restarted, None
        if restarted is None:
            pass
        elif error is None:
            restarted.set_result(None)
        else:
            restarted.set_exception(error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:  # without this task requests would wait forever
            log.error("the supervision of the engine failed", exc_info=error)
            self._stop(State.FAILED, EngineStopped("a task that supervises the engine failed; see the server's log"))
