"""Streams: the operations of one state, executed one after the other on the backend's event loop.

A stream has a task on the loop only while it has operations that may run. A fork is an operation of the parent, so
that it starts with the parent's text at that point. A join is an operation of the parent, too.
"""

import asyncio
import logging
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Any
from uuid import uuid4

from quire.core.scheduling_params import Program
from quire.errors import QuireError, RequestError, nearest
from quire.lang import expressions
from quire.lang.errors import BackendClosed
from quire.lang.expressions import Expr
from quire.lang.interpreter import Executor, Setting
from quire.lang.state_text import StateText


class StreamCondition:
    """A condition variable for threads and coroutines.

    Usage: `with condition: modify the data; condition.notify_all()`.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._callbacks: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        self._condition.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._condition.release()

    def notify_all(self) -> None:
        """Wake all waiting threads and coroutines."""
        with self._condition:
            self._condition.notify_all()
            for callback in self._callbacks:
                callback()

    def wait(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `predicate()`, which is called under the lock. False after `timeout` seconds."""
        with self._condition:
            return self._condition.wait_for(predicate, timeout)

    async def wait_async(self, predicate: Callable[[], bool]) -> None:
        """As `wait`, for a coroutine on any event loop."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()

        def callback() -> None:
            with suppress(RuntimeError):  # that loop is closed, with the coroutine that waited
                loop.call_soon_threadsafe(event.set)

        with self._condition:
            self._callbacks.append(callback)
        try:
            while True:
                event.clear()
                with self._condition:
                    if predicate():
                        return
                await event.wait()
        finally:
            with self._condition:
                self._callbacks.remove(callback)


log = logging.getLogger(__name__)


class Stream:
    """The operations of one state.

    program, branch: ids in the program hints. held: do not start before `release`, which the parent's Fork calls.
    names: variables that the state has, or will have after all operations. error: the error that ended the stream.
    """

    def __init__(
        self, setting: Setting, program: str, branch: str = "", *, held: bool = False, names: Iterable[str] = ()
    ) -> None:
        self.condition = StreamCondition()
        self.error: BaseException | None = None
        self.names = set(names)
        self._setting = setting
        self._loop = setting.backend.loop
        self._program = Program(id=program, branch=branch)
        self._executor = Executor(setting, StateText(), self._next_program, self.condition.notify_all)
        self._queue: deque[Expr] = deque()
        self._pending: Counter[str] = Counter()  # variable -> unfinished operations that set it
        self._unset_names: set[str] = set()  # variables that are unset because of the error
        self._held = held
        self._is_running = False
        self._ended = False  # whether `end` was called
        self._expects_more = False  # whether the last program hints had expects_more
        self._num_submitted = self._num_done = 0
        self._task: asyncio.Task[None] | None = None

    # For the program

    def submit(self, expr: Expr) -> int:
        """Append operations, and return `num_submitted`. After an error they are dropped. Raises BackendClosed."""
        ops = list(expr.flat())
        with self.condition:
            self.names.update(name for op in ops for name in op.variables)
            if self.error is not None:
                self._drop(ops, self.error)
                return self._num_submitted
            for op in ops:
                self._pending.update(op.variables)
            self._queue.extend(ops)
            self._num_submitted += len(ops)
            self._maybe_start()
            return self._num_submitted

    def sync(self) -> None:
        """Wait until all operations appended so far are done, or the stream has failed."""
        self.condition.wait(self._has_done(self._num_submitted))

    async def wait_done(self, number: int) -> None:
        """Wait until the first `number` operations are done. Raises the stream's error."""
        await self.condition.wait_async(self._has_done(number))
        if self.error is not None:
            raise self.error

    @property
    def num_submitted(self) -> int:
        """Number of operations that were appended."""
        return self._num_submitted

    def end(self) -> None:
        """Declare that no more operations will be appended."""
        with self.condition, suppress(BackendClosed):
            self._ended = True
            self.condition.notify_all()
            if self._expects_more:
                self._loop.call_soon(self._maybe_send_end)

    def get_var(self, name: str) -> Any:  # noqa: ANN401
        """Wait for a variable and return it. Raises its error, or KeyError."""
        self.condition.wait(lambda: self.is_settled(name))
        return self.value(name)

    def get_meta(self, name: str, timeout: float | None = None) -> dict[str, Any] | None:
        """Wait for a variable and return its meta info. Raises its error, and TimeoutError after `timeout` seconds."""
        if not self.condition.wait(lambda: self.is_settled(name), timeout):
            raise TimeoutError(f"{name!r} is not set after {timeout} seconds")
        with self.condition:
            if self.error is not None and name in self._unset_names:
                raise self.error
            return self.state_text.meta.get(name)

    @property
    def state_text(self) -> StateText:
        """Text and variables so far."""
        return self._executor.state_text

    def is_settled(self, name: str) -> bool:
        """Whether a variable has its final value, or will never be set."""
        if self.error is not None or self._is_idle():
            return True
        return not (self._held or self._pending[name] or self._is_deferred(name))

    def value(self, name: str) -> Any:  # noqa: ANN401
        """The value of a settled variable. Raises its error, RequestError for one of an open chat turn, or KeyError."""
        with self.condition:
            variables = self.state_text.variables
            if self.error is not None and (name in self._unset_names or name not in variables):
                raise self.error
            if self._is_deferred(name):
                raise RequestError(
                    f"{name!r} is set only when the turn ends, which this endpoint generates in one call"
                )
            if name not in variables:
                raise KeyError(f"the program has no variable {name!r}{nearest(name, variables)}")
            return variables[name]

    def is_final(self, *, idle_is_final: bool) -> bool:
        """Whether the text is final. idle_is_final: whether an idle stream counts as final without `end`."""
        return self.error is not None or (self._is_idle() and (self._ended or idle_is_final))

    def fail(self, error: BaseException, *, even_if_idle: bool = False) -> None:
        """Cancel all unfinished operations, and fail the forks among them.

        Has no effect on a failed stream, and on an idle one unless `even_if_idle`.
        """
        with self.condition:
            if self.error is not None or (self._is_idle() and not even_if_idle):
                return
            self.error = error
            if self._task is not None:
                with suppress(BackendClosed):
                    self._loop.call_soon(self._task.cancel)
            dropped, self._queue = list(self._queue), deque()
            self._unset_names.update(name for name, count in self._pending.items() if count)
            self._unset_names.update(self._executor.chat_turn.names if self._executor.chat_turn is not None else ())
            self._is_running = self._held = False
            self._drop(dropped, error)
            self.condition.notify_all()

    # On the event loop

    def release(self, state_text: StateText) -> None:
        """Start a held stream, with a copy of the parent's text and variables."""
        with self.condition:
            if self.error is not None:
                return
            self._executor.state_text = state_text
            self._held = False
            self._maybe_start()
            self.condition.notify_all()

    def _start(self) -> None:
        with self.condition:
            if self._is_running:
                self._task = self._loop.spawn(self._work())

    async def _work(self) -> None:
        try:
            while (op := self._next()) is not None:
                await self._do(op)
                self._finish(op)
        except Exception as error:
            log.warning("a stream of a program failed: %s", error)
            self.fail(error)
        except BaseException:
            self.fail(BackendClosed("the backend was closed while the program ran"))
            raise
        finally:
            self._task = None

    async def _do(self, op: Expr) -> None:
        match op:
            case Fork(children):
                for child in children:
                    child.release(self.state_text.fork())
            case Gather(children, names):
                await _all_done(children)
                written = [child.state_text.variables for child, _ in children]
                self.state_text.variables |= {name: [one[name] for one in written if name in one] for name in names}
            case Append(children):
                await _all_done(children)
                for child, _ in children:
                    self._executor.fill(child.state_text.text[child.state_text.fork_start :])
            case expressions.Reasoning(name):
                with self.condition:  # readers must not see a half-done change
                    self._executor.separate_reasoning(name)
            case _:
                await self._executor.execute(op)

    def _maybe_send_end(self) -> None:
        """If no more operations come and the last hints had expects_more, start to send the end of the branch."""
        with self.condition:
            if self._ended and self._expects_more and self.error is None and self._is_idle():
                self._expects_more = False
                self._loop.spawn(self._send_end())

    async def _send_end(self) -> None:
        """Send the end of the branch. Errors are only logged, as it is a hint.

        At interpreter exit the error is a RuntimeError: no thread can be started that looks up the server's address.
        """
        try:
            branch = self._program.branch or None  # the end of the trunk ends all branches
            await self._setting.backend.end_program(self._program.id, branch)
        except (QuireError, RuntimeError) as error:
            log.debug("failed to send the end of a program to the backend: %s", error)

    def _next(self) -> Expr | None:
        with self.condition:
            if self.error is not None:
                return None
            if self._queue:
                return self._queue.popleft()
            self._is_running = False
            self.condition.notify_all()
            self._maybe_send_end()
            return None

    def _finish(self, op: Expr) -> None:
        with self.condition:
            self._num_done += 1
            self._pending.subtract(op.variables)
            self.condition.notify_all()

    def _next_program(self) -> Program | None:
        """The program hints of the next call."""
        if not self._setting.backend.hints:
            return None
        with self.condition:
            self._expects_more = bool(self._queue) or not self._ended
            return Program(id=self._program.id, branch=self._program.branch, expects_more=self._expects_more)

    # Under the lock

    def _maybe_start(self) -> None:
        if self._is_running or self._held or not self._queue:
            return
        self._is_running = True
        try:
            self._loop.call_soon(self._start)
        except BackendClosed as error:
            self.fail(error)
            raise

    def _is_idle(self) -> bool:
        return not (self._held or self._is_running or self._queue)

    def _is_deferred(self, name: str) -> bool:
        return self._executor.chat_turn is not None and name in self._executor.chat_turn.names

    def _has_done(self, number: int) -> Callable[[], bool]:
        return lambda: self.error is not None or (not self._held and self._num_done >= number)

    def _drop(self, ops: Iterable[Expr], error: BaseException) -> None:
        for op in ops:
            self._unset_names.update(op.variables)
            if isinstance(op, Fork):
                for child in op.children:
                    child.fail(error)


Branches = tuple[tuple[Stream, int], ...]  # each with the number of operations to wait for


@dataclass(frozen=True, slots=True, eq=False)
class Fork(Expr):
    """Starts streams with the text and variables so far."""

    children: tuple[Stream, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Gather(Expr):
    """Waits for streams, and sets variables to lists of theirs."""

    children: Branches
    names: tuple[str, ...]

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables that become lists."""
        return self.names


@dataclass(frozen=True, slots=True, eq=False)
class Append(Expr):
    """Waits for streams, and appends their text since the fork."""

    children: Branches


async def _all_done(children: Branches) -> None:
    for child, number in children:
        await child.wait_done(number)


class Run:
    """One run of a program, with all its streams.

    owner: id of the thread on which the program's function runs; None before and after.
    failed_by_stream: whether the error that stopped the run was the error of a stream, not of the function's own code.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.id = uuid4().hex
        self.owner: int | None = None
        self.failed_by_stream = False
        self._branches = count(1)
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._lock = threading.Lock()
        self.trunk = Stream(setting, self.id)
        self._streams.add(self.trunk)

    def fork(self, names: Iterable[str]) -> Stream:
        """A new stream that starts at `release`. names: variables that it will have then."""
        stream = Stream(self.setting, self.id, str(next(self._branches)), held=True, names=names)
        with self._lock:
            self._streams.add(stream)
        return stream

    def begin(self) -> None:
        """Record that this thread runs the function."""
        self.owner = threading.get_ident()

    def end(self) -> None:
        """The function has returned or raised: end all streams."""
        self.owner = None
        for stream in self._all():
            stream.end()

    def sync(self) -> None:
        """Wait for all appended operations of all streams."""
        for stream in self._all():
            stream.sync()

    def stop(self, error: BaseException) -> None:
        """Fail all streams with unfinished operations, and the trunk in any case."""
        self.failed_by_stream = any(stream.error is error for stream in self._all())
        for stream in self._all():
            stream.fail(error)
        self.trunk.fail(error, even_if_idle=True)

    def _all(self) -> list[Stream]:
        with self._lock:
            return list(self._streams)
