"""Cache of compiled constraints. A constraint that another tenant compiled, or that has another salt, is compiled anew.

The front end caches the results of checks, the engine caches grammars. A thread cannot be stopped: a compilation that
exceeds the deadline continues until the backend's own limits stop it, but its requests have failed already.
"""

import asyncio
import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from quire.core.request import NO_NAMESPACE, Namespace
from quire.errors import EngineStopped, RequestError
from quire.params import StructuredOutputsParams
from quire.structured_outputs.backends import check
from quire.tenant_queue import TenantQueue

log = logging.getLogger(__name__)

NUM_THREADS = 2  # that one tenant occupies at most; there is one more
DEADLINE = 5.0  # seconds until a compilation starts, and again until it ends
STACK_BYTES = 16 * 2**20  # twice the stack with which the limits of constraints were tested
CHARACTERS_PER_ENTRY = 2**12  # size of an entry whose constraint is empty
CAPACITY = 2**20  # characters: at most 256 grammars. A grammar takes up to 100 bytes per character of its constraint
CHECK_CAPACITY = 2**24  # characters: at most 4096 results of checks, which take less than 2 kB each
MAX_UNFINISHED_CHECKS = 64
SHARES = 4  # with keys, a tenant has at most one of so many equal parts of the capacity
_MAX_MESSAGE = 1000  # characters; a backend may quote a whole schema


class Compilable(Protocol):
    """A constraint as the cache sees it."""

    @property
    def kind(self) -> str:
        """What an error message names."""

    @property
    def text(self) -> str:
        """The schema, pattern, grammar or tag, which determines the size of the entry."""

    @property
    def identity(self) -> tuple[object, ...]:
        """All that its grammar depends on."""


C = TypeVar("C", bound=Compilable)
T = TypeVar("T")
Result = Literal["ok", "bad", "slow"]
Key = tuple[str, bytes]  # salt, SHA-256 of the constraint


class Fault(NamedTuple):
    """Why there is no grammar: message and field of a RequestError."""

    message: str
    param: str | None = None


OVERLOADED = Fault("too many constraints are being compiled; try again later")


class CompilerOverloaded(RequestError):
    """Other compilations occupy the threads."""


@dataclass(eq=False, slots=True)
class Compilation(Generic[C, T]):
    """The compilation of one constraint of one namespace. Requests with the same constraint share it.

    started_at: time at which a thread started it; None before.
    """

    kind: str  # of the constraint
    tenant: str
    key: Key
    size: int  # characters
    result: "Future[T | Fault]" = field(default_factory=Future)
    started_at: float | None = None
    num_waiting: int = 0  # requests that wait for the result
    params: C | None = None  # of a compilation that is not finished


@dataclass(eq=False, slots=True)
class _Entries(Generic[C, T]):
    """The entries of one tenant, least recently used first."""

    compilations: OrderedDict[Key, Compilation[C, T]] = field(default_factory=OrderedDict)
    size: int = 0  # characters


class GrammarCache(Generic[C, T]):
    """Compiles constraints on threads of its own, for which tenants take turns.

    Entries are found by tenant, cache salt and content. With keys, a tenant has at most 1/SHARES of the capacity:
    beyond it, the tenant's own least recently used entry is evicted. If all tenants together exceed the capacity, the
    tenant with the largest entries loses one. Without keys there is one tenant, which has the whole capacity. All
    methods must be called from one thread.
    """

    def __init__(
        self,
        compile_one: Callable[[C], T],
        *,
        capacity: int = CAPACITY,
        max_unfinished: int | None = None,
        deadline: float = DEADLINE,
        clock: Callable[[], float] = time.monotonic,
        report: Callable[[Result, float], None] | None = None,
    ) -> None:
        """compile_one: raises RequestError for a constraint that is refused.

        capacity: in characters; an entry counts CHARACTERS_PER_ENTRY and the length of its constraint.
        max_unfinished: compilations that run or wait for a thread. A tenant has the same share of them as of the
        capacity. deadline: in seconds of `clock`. report: called on the compiling thread with each result and its
        seconds.
        """
        self._compile_one = compile_one
        self._capacity = capacity
        self._max_unfinished = max_unfinished
        self._deadline = deadline
        self._clock = clock
        self._report = report
        self._tenants: dict[str, _Entries[C, T]] = {}
        self._size = 0  # characters of all entries
        self._unfinished: list[Compilation[C, T]] = []
        self._queue: TenantQueue[Compilation[C, T]] = TenantQueue(NUM_THREADS)
        self._threads: list[threading.Thread] = []
        self._waiting: set[asyncio.Event] = set()  # of coroutines
        self._closed = False

    def request(self, namespace: Namespace, params: C) -> Compilation[C, T]:
        """The compilation of a constraint, which is started if the namespace has none. Must be released."""
        tenant, key = namespace.tenant, (namespace.salt, _digest(params))
        entries = self._tenants.get(tenant)
        work = None if entries is None else entries.compilations.get(key)
        if entries is None or work is None:
            work = Compilation(params.kind, tenant, key, CHARACTERS_PER_ENTRY + len(params.text))
            if self._is_overloaded(tenant):
                work.result.set_result(OVERLOADED)
            else:
                self._start(work, params)
        else:
            entries.compilations.move_to_end(key)
        work.num_waiting += 1
        return work

    def release(self, work: Compilation[C, T]) -> None:
        """A request no longer waits for this compilation. It is cancelled if it has not begun and no other waits."""
        work.num_waiting -= 1
        if not work.num_waiting and work.result.cancel():
            work.params = None  # the queue still has the compilation
            self._remove(work)

    def outcome(self, work: Compilation[C, T], since: float) -> T | Fault | None:
        """The result of a compilation for a request that waits since this time of the clock. None: no result yet."""
        if work.result.done():
            return work.result.result()
        if self._seconds_left(work, since) > 0:
            return None
        if work.started_at is None:
            return OVERLOADED
        message = f"{work.kind} could not be compiled within {self._deadline:g} s; make it smaller or simpler"
        return Fault(message, work.kind)

    async def compiled(self, namespace: Namespace, params: C) -> T:
        """The result for a constraint. Raises RequestError, CompilerOverloaded, and EngineStopped after `close`."""
        self._check_open()
        since = self._clock()
        work = self.request(namespace, params)
        finished = asyncio.Event()
        self._waiting.add(finished)
        try:
            if not work.result.done():
                work.result.add_done_callback(_setter(finished, asyncio.get_running_loop()))
            while (outcome := self.outcome(work, since)) is None:
                with suppress(TimeoutError):
                    await asyncio.wait_for(finished.wait(), self._seconds_left(work, since))
                self._check_open()
        finally:
            self._waiting.discard(finished)
            self.release(work)
        if isinstance(outcome, Fault):
            raise (CompilerOverloaded if outcome is OVERLOADED else RequestError)(*outcome)
        return outcome

    def drop(self, grammar: T) -> None:
        """Remove a grammar that failed: the next request with its constraint compiles it anew. Ignores others."""
        for entries in self._tenants.values():
            for work in entries.compilations.values():
                if work.result.done() and work.result.result() is grammar:
                    return self._remove(work)

    def close(self) -> None:
        """Reject waiting coroutines. Threads are daemons: a compilation does not keep the process alive."""
        self._closed = True
        for work in self._unfinished:
            work.result.cancel()
        for finished in self._waiting:
            finished.set()
        self._queue.close()

    def _start(self, work: Compilation[C, T], params: C) -> None:
        while len(self._threads) <= NUM_THREADS:
            thread = threading.Thread(target=self._work, name="quire-grammar", daemon=True)
            with _large_stack():
                thread.start()
            self._threads.append(thread)
        entries = self._tenants.setdefault(work.tenant, _Entries())
        entries.compilations[work.key] = work
        entries.size += work.size
        self._size += work.size
        while entries.size > _share(work.tenant, self._capacity):
            self._remove(next(iter(entries.compilations.values())))
        while self._size > self._capacity:
            _, _, largest = max((one.size, name == work.tenant, name) for name, one in self._tenants.items())
            self._remove(next(iter(self._tenants[largest].compilations.values())))
        self._unfinished.append(work)
        work.params = params
        self._queue.put(work.tenant, work)

    def _remove(self, work: Compilation[C, T]) -> None:
        """Remove an entry. Requests that wait for its compilation still get the result. Ignores a removed entry."""
        entries = self._tenants.get(work.tenant)
        if entries is None or entries.compilations.get(work.key) is not work:
            return
        del entries.compilations[work.key]
        entries.size -= work.size
        self._size -= work.size
        if not entries.compilations:
            del self._tenants[work.tenant]

    def _is_overloaded(self, tenant: str) -> bool:
        self._unfinished = [work for work in self._unfinished if not work.result.done()]
        if self._max_unfinished is None:
            return False
        own = sum(work.tenant == tenant for work in self._unfinished)
        return len(self._unfinished) >= self._max_unfinished or own >= _share(tenant, self._max_unfinished)

    def _seconds_left(self, work: Compilation[C, T], since: float) -> float:
        begin = since if work.started_at is None else work.started_at
        return begin + self._deadline - self._clock()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineStopped("the server is shutting down")

    def _work(self) -> None:
        """The loop of a thread."""
        while (taken := self._queue.get()) is not None:
            tenant, work = taken
            params, work.params = work.params, None
            if params is not None and work.result.set_running_or_notify_cancel():
                work.started_at = self._clock()
                start = time.perf_counter()
                result = self._compile_or_fault(params)
                seconds = time.perf_counter() - start
                if self._report is not None:
                    self._report(_verdict(result, is_slow=seconds > self._deadline), seconds)
                work.result.set_result(result)
            self._queue.done(tenant)

    def _compile_or_fault(self, params: C) -> T | Fault:
        try:
            return self._compile_one(params)
        except RequestError as error:
            return Fault(str(error)[:_MAX_MESSAGE], error.param or params.kind)
        except BaseException:  # also a panic of a backend
            log.exception("a constraint of kind %s could not be compiled", params.kind)
            return Fault(f"{params.kind} cannot be compiled by this server; change it", params.kind)


def front_end_cache(
    backend: str, report: Callable[[Result, float], None] | None = None
) -> GrammarCache[StructuredOutputsParams, bool]:
    """A cache of checks: constraints are compiled as far as the backend does without a vocabulary, and not kept."""

    def is_valid(params: StructuredOutputsParams) -> bool:
        check(params, backend)
        return True

    return GrammarCache(is_valid, capacity=CHECK_CAPACITY, max_unfinished=MAX_UNFINISHED_CHECKS, report=report)


def _share(tenant: str, total: int) -> int:
    """The part of `total` that a tenant may have. Without keys there is only one tenant."""
    return total if tenant == NO_NAMESPACE.tenant else total // SHARES


def _verdict(result: object, *, is_slow: bool) -> Result:
    if is_slow:
        return "slow"
    return "bad" if isinstance(result, Fault) else "ok"


def _digest(params: Compilable) -> bytes:
    """Hash of all that a grammar depends on."""
    return hashlib.sha256(repr(params.identity).encode()).digest()


def _setter(event: asyncio.Event, loop: asyncio.AbstractEventLoop) -> Callable[[object], None]:
    """A callback that sets the event from any thread. It does nothing once the loop is closed."""

    def set_event(_done: object) -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(event.set)

    return set_event


_STACK_SIZE_LOCK = threading.Lock()


@contextmanager
def _large_stack() -> Iterator[None]:
    """Threads that are started inside have a stack of STACK_BYTES, whatever the system's limit is."""
    with _STACK_SIZE_LOCK:
        before = threading.stack_size(STACK_BYTES)
        try:
            yield
        finally:
            threading.stack_size(before)
