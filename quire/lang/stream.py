"""Stream: the operations that a program has appended to one state, done one after the other. Knows threads and the
backend's loop; what an operation does is the executor's business.

A stream is no thread. While it has operations and may do them, one task on the loop does; otherwise it is only data.
A fork is an operation of its parent, so that it begins with what the parent has there; a join is one, too.
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
from quire.lang.state_text import Scene


class Changes:
    """A lock around what changes, and a bell for those who wait: `with changes: change it; changes.tell()`."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._bells: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        self._condition.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._condition.release()

    def tell(self) -> None:
        """Something has changed."""
        with self._condition:
            self._condition.notify_all()
            for bell in self._bells:
                bell()

    def wait(self, is_so: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `is_so()`, which is asked under the lock; False after `timeout` seconds."""
        with self._condition:
            return self._condition.wait_for(is_so, timeout)

    async def until(self, is_so: Callable[[], bool]) -> None:
        """The same, on any event loop."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()

        def bell() -> None:
            with suppress(RuntimeError):  # that loop has ended, and with it whoever waited there
                loop.call_soon_threadsafe(event.set)

        with self._condition:
            self._bells.append(bell)
        try:
            while True:
                event.clear()
                with self._condition:
                    if is_so():
                        return
                await event.wait()
        finally:
            with self._condition:
                self._bells.remove(bell)


log = logging.getLogger(__name__)


class Stream:
    """One line of a program.

    program, branch: what the scheduler calls it. held: it may not begin before its parent comes to where it was
    forked. names: variables that it has, or will have once all is done. error: what it ended with.
    """

    def __init__(
        self, setting: Setting, program: str, branch: str = "", *, held: bool = False, names: Iterable[str] = ()
    ) -> None:
        self.changes = Changes()
        self.error: BaseException | None = None
        self.names = set(names)
        self._setting = setting
        self._loop = setting.backend.loop
        self._program = Program(id=program, branch=branch)
        self._executor = Executor(setting, Scene(), self._next_call, self.changes.tell)
        self._queue: deque[Expr] = deque()
        self._pending: Counter[str] = Counter()  # operations that set a variable
        self._lost: set[str] = set()  # variables that an error left unset
        self._held = held
        self._works = False
        self._ended = False  # nothing more is to come
        self._promised = False  # the scheduler was told that more is to come
        self._num_submitted = self._num_done = 0
        self._task: asyncio.Task[None] | None = None

    # For the program

    def submit(self, expr: Expr) -> int:
        """Append operations; the number of all that were. Behind an error nothing is done. Raises BackendClosed."""
        ops = list(expr.flat())
        with self.changes:
            self.names.update(name for op in ops for name in op.variables)
            if self.error is not None:
                self._lose(ops, self.error)
                return self._num_submitted
            for op in ops:
                self._pending.update(op.variables)
            self._queue.extend(ops)
            self._num_submitted += len(ops)
            self._wake()
            return self._num_submitted

    def sync(self) -> None:
        """Wait until all that was appended by now is done, or nothing will be."""
        self.changes.wait(self._has_done(self._num_submitted))

    async def done(self, number: int) -> None:
        """Wait for so many operations. Raises what went wrong."""
        await self.changes.until(self._has_done(number))
        if self.error is not None:
            raise self.error

    @property
    def num_submitted(self) -> int:
        """Operations that were appended."""
        return self._num_submitted

    def end(self) -> None:
        """Nothing more is to come."""
        with self.changes, suppress(BackendClosed):
            self._ended = True
            self.changes.tell()
            if self._promised:
                self._loop.call(self._tell_end)

    def get_var(self, name: str) -> Any:  # noqa: ANN401
        """A variable, once it is known. Raises what went wrong with it, or KeyError."""
        self.changes.wait(lambda: self.is_settled(name))
        return self.value(name)

    def get_meta(self, name: str, timeout: float | None = None) -> dict[str, Any] | None:
        """What the backend said of a variable. Raises what went wrong with it, and TimeoutError after seconds."""
        if not self.changes.wait(lambda: self.is_settled(name), timeout):
            raise TimeoutError(f"{name!r} is not known after {timeout} seconds")
        with self.changes:
            if self.error is not None and name in self._lost:
                raise self.error
            return self.scene.meta.get(name)

    @property
    def scene(self) -> Scene:
        """What is written so far."""
        return self._executor.scene

    def is_settled(self, name: str) -> bool:
        """Whether a variable is known, or will never be."""
        if self.error is not None or self._is_at_rest():
            return True
        return not (self._held or self._pending[name] or self._is_deferred(name))

    def value(self, name: str) -> Any:  # noqa: ANN401
        """A variable that is settled. Raises what went wrong with it, or KeyError."""
        with self.changes:
            variables = self.scene.variables
            if self.error is not None and (name in self._lost or name not in variables):
                raise self.error
            if self._is_deferred(name):
                raise RequestError(f"{name!r} is known when the turn ends, which this endpoint writes as a whole")
            if name not in variables:
                raise KeyError(f"the program has no variable {name!r}{nearest(name, variables)}")
            return variables[name]

    def is_over(self, *, at_rest: bool) -> bool:
        """Whether its text stays as it is. at_rest: nobody appends anything while it rests."""
        return self.error is not None or (self._is_at_rest() and (self._ended or at_rest))

    def fail(self, error: BaseException, *, though_done: bool = False) -> None:
        """Do nothing more; forks that have not begun fail with it. though_done: also where there is nothing to do."""
        with self.changes:
            if self.error is not None or (self._is_at_rest() and not though_done):
                return
            self.error = error
            if self._task is not None:
                with suppress(BackendClosed):
                    self._loop.call(self._task.cancel)
            dropped, self._queue = list(self._queue), deque()
            self._lost.update(name for name, count in self._pending.items() if count)
            self._lost.update(self._executor.turn.names if self._executor.turn is not None else ())
            self._works = self._held = False
            self._lose(dropped, error)
            self.changes.tell()

    # On the loop

    def release(self, scene: Scene) -> None:
        """Begin, with what the parent has."""
        with self.changes:
            if self.error is not None:
                return
            self._executor.scene = scene
            self._held = False
            self._wake()
            self.changes.tell()

    def _start(self) -> None:
        with self.changes:
            if self._works:
                self._task = self._loop.spawn(self._work())

    async def _work(self) -> None:
        try:
            while (op := self._next()) is not None:
                await self._do(op)
                self._finish(op)
        except Exception as error:
            log.warning("a program's stream ended with an error: %s", error)
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
                    child.release(self.scene.forked())
            case Gather(children, names):
                await _all_done(children)
                written = [child.scene.variables for child, _ in children]
                self.scene.variables |= {name: [one[name] for one in written if name in one] for name in names}
            case Append(children):
                await _all_done(children)
                for child, _ in children:
                    self._executor.fill(child.scene.text[child.scene.fork_start :])
            case expressions.Reasoning(name):
                with self.changes:  # whoever reads the text sees it before or after
                    self._executor.separate(name)
            case _:
                await self._executor.execute(op)

    def _tell_end(self) -> None:
        """Tell the scheduler that nothing more comes, though it expects more. No operation: nobody waits for it."""
        with self.changes:
            if self._ended and self._promised and self.error is None and self._is_at_rest():
                self._promised = False
                self._loop.spawn(self._told_end())

    async def _told_end(self) -> None:
        """A hint: without it everything is as it would be."""
        try:
            branch = self._program.branch or None  # with its trunk, all of it ends
            await self._setting.backend.end_program(self._program.id, branch)
        except QuireError as error:
            log.debug("the end of a program could not be told: %s", error)

    def _next(self) -> Expr | None:
        with self.changes:
            if self.error is not None:
                return None
            if self._queue:
                return self._queue.popleft()
            self._works = False
            self.changes.tell()
            self._tell_end()
            return None

    def _finish(self, op: Expr) -> None:
        with self.changes:
            self._num_done += 1
            self._pending.subtract(op.variables)
            self.changes.tell()

    def _next_call(self) -> Program | None:
        """What the scheduler is told with the next call."""
        if not self._setting.backend.hints:
            return None
        with self.changes:
            self._promised = bool(self._queue) or not self._ended
            return Program(id=self._program.id, branch=self._program.branch, expects_more=self._promised)

    # Under the lock

    def _wake(self) -> None:
        if self._works or self._held or not self._queue:
            return
        self._works = True
        try:
            self._loop.call(self._start)
        except BackendClosed as error:
            self.fail(error)
            raise

    def _is_at_rest(self) -> bool:
        return not (self._held or self._works or self._queue)

    def _is_deferred(self, name: str) -> bool:
        return self._executor.turn is not None and name in self._executor.turn.names

    def _has_done(self, number: int) -> Callable[[], bool]:
        return lambda: self.error is not None or (not self._held and self._num_done >= number)

    def _lose(self, ops: Iterable[Expr], error: BaseException) -> None:
        for op in ops:
            self._lost.update(op.variables)
            if isinstance(op, Fork):
                for child in op.children:
                    child.fail(error)


Branches = tuple[tuple[Stream, int], ...]  # each with the number of its operations that count


@dataclass(frozen=True, slots=True, eq=False)
class Fork(Expr):
    """Streams that begin here."""

    children: tuple[Stream, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Gather(Expr):
    """Wait for streams, and take over their variables as lists."""

    children: Branches
    names: tuple[str, ...]

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables that become lists."""
        return self.names


@dataclass(frozen=True, slots=True, eq=False)
class Append(Expr):
    """Wait for streams, and append what they have written since they were forked."""

    children: Branches


async def _all_done(children: Branches) -> None:
    for child, number in children:
        await child.done(number)


class Run:
    """owner: the thread on which the program's function runs; None once it is over.

    failed_by_itself: it was stopped by an error of one of its streams, and not by its function's code.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.id = uuid4().hex
        self.owner: int | None = None
        self.failed_by_itself = False
        self._branches = count(1)
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._lock = threading.Lock()
        self.trunk = Stream(setting, self.id)
        self._streams.add(self.trunk)

    def fork(self, names: Iterable[str]) -> Stream:
        """A stream that begins when it is released. names: variables that it will have then."""
        stream = Stream(self.setting, self.id, str(next(self._branches)), held=True, names=names)
        with self._lock:
            self._streams.add(stream)
        return stream

    def end(self) -> None:
        """The function is over: no stream gets more from it."""
        self.owner = None
        for stream in self._all():
            stream.end()

    def sync(self) -> None:
        """Wait until all that was appended is done."""
        for stream in self._all():
            stream.sync()

    def stop(self, error: BaseException) -> None:
        """Give up all that is not done, because of an error, which the trunk then has."""
        self.failed_by_itself = any(stream.error is error for stream in self._all())
        for stream in self._all():
            stream.fail(error)
        self.trunk.fail(error, though_done=True)

    def _all(self) -> list[Stream]:
        with self._lock:
            return list(self._streams)
