"""Validation of constraints by the grammar backend, before a request is queued or a stream begins.

A check can take long, and a thread cannot be stopped. So checks have their own threads, the number and the duration of
pending checks are bounded, and results are cached by content.
"""

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Literal, NamedTuple

from quire.errors import EngineStopped, RequestError
from quire.params import StructuredOutputsParams
from quire.server.errors import Busy
from quire.structured_outputs.compile import large_thread_stacks

log = logging.getLogger(__name__)

NUM_THREADS = 2
MAX_JOBS = 64  # running and waiting
MAX_SECONDS = 5.0  # maximum wait for the beginning of a check, and again for its end
MAX_CACHED_RESULTS = 4096  # cached results
_MAX_MESSAGE = 1000  # characters; a backend may quote a whole schema

Check = Callable[[StructuredOutputsParams], None]  # raises RequestError
Result = Literal["ok", "bad", "slow"]


class Fault(NamedTuple):
    """Why a constraint is rejected: message and field of a RequestError."""

    message: str
    param: str


@dataclass(eq=False, slots=True)
class _Job:
    """A check that all concurrent requests with the same constraint share."""

    key: bytes
    constraint: StructuredOutputsParams
    loop: asyncio.AbstractEventLoop
    began: asyncio.Future[float]  # time of the loop's clock
    ended: asyncio.Future[Fault | None]
    num_waiting: int = 0


class GrammarChecks:
    """check: validates; raises RequestError. tell(result, seconds): called for each check, not for cached results."""

    def __init__(self, check: Check, report: Callable[[Result, float], None]) -> None:
        self._check = check
        self._report = report
        self._cached_results: OrderedDict[bytes, Fault | None] = OrderedDict()
        self._jobs: dict[bytes, _Job] = {}
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._closed = False

    async def check(self, constraint: StructuredOutputsParams) -> None:
        """Raises RequestError for an invalid constraint, Busy if too many checks wait, EngineStopped after `close`."""
        key = _key(constraint)
        if key in self._cached_results:
            self._cached_results.move_to_end(key)
            fault = self._cached_results[key]
        else:
            fault = await self._wait_for_result(key, constraint)
        self._check_open()
        if fault is not None:
            raise RequestError(*fault)

    def close(self) -> None:
        """Reject waiting callers. A thread whose check does not end is a daemon and does not keep the process alive."""
        self._closed = True
        for job in self._jobs.values():
            self._begin(job)
            self._set_result(job, None)
        for _ in self._threads:
            self._queue.put(None)

    async def _wait_for_result(self, key: bytes, constraint: StructuredOutputsParams) -> Fault | None:
        job = self._jobs.get(key) or self._submit(key, constraint)
        job.num_waiting += 1
        try:
            async with asyncio.timeout(MAX_SECONDS):
                began = await asyncio.shield(job.began)
        except TimeoutError:  # other checks occupy the threads
            raise Busy from None
        finally:
            job.num_waiting -= 1
        try:
            async with asyncio.timeout_at(began + MAX_SECONDS):
                return await asyncio.shield(job.ended)
        except TimeoutError:
            if not job.ended.done():
                self._report("slow", MAX_SECONDS)
                message = f"{constraint.kind} could not be checked within {MAX_SECONDS:g} s; make it smaller or simpler"
                self._set_result(job, Fault(message, constraint.kind))
            return job.ended.result()

    def _submit(self, key: bytes, constraint: StructuredOutputsParams) -> _Job:
        self._check_open()
        if len(self._jobs) >= MAX_JOBS:
            raise Busy
        while len(self._threads) < NUM_THREADS:
            self._threads.append(Thread(target=self._work, name="quire-checks", daemon=True))
            with large_thread_stacks():
                self._threads[-1].start()
        loop = asyncio.get_running_loop()
        job = self._jobs[key] = _Job(key, constraint, loop, loop.create_future(), loop.create_future())
        self._queue.put(job)
        return job

    def _work(self) -> None:
        """The loop of a thread."""
        while (job := self._queue.get()) is not None:
            with suppress(RuntimeError):  # the event loop is closed
                if not job.num_waiting:
                    job.loop.call_soon_threadsafe(self._drop, job)
                    continue
                job.loop.call_soon_threadsafe(self._begin, job)
                start = time.perf_counter()
                fault = self._run_check(job.constraint)
                job.loop.call_soon_threadsafe(self._end, job, fault, time.perf_counter() - start)

    def _run_check(self, constraint: StructuredOutputsParams) -> Fault | None:
        try:
            self._check(constraint)
        except RequestError as error:
            return Fault(str(error)[:_MAX_MESSAGE], error.param or constraint.kind)
        except BaseException:  # also a panic of a backend
            log.exception("constraint of kind %s could not be checked", constraint.kind)
            return Fault(f"{constraint.kind} cannot be compiled by this server; change it", constraint.kind)
        return None

    def _drop(self, job: _Job) -> None:
        if job.num_waiting:  # a request has joined the job since
            self._queue.put(job)
        else:
            self._jobs.pop(job.key)

    def _begin(self, job: _Job) -> None:
        if not job.began.done():
            job.began.set_result(job.loop.time())

    def _end(self, job: _Job, fault: Fault | None, seconds: float) -> None:
        self._jobs.pop(job.key)
        if not job.ended.done():  # no timeout has set a result
            self._report("bad" if fault else "ok", seconds)
        self._set_result(job, fault)  # after a timeout, this replaces the cached result

    def _set_result(self, job: _Job, fault: Fault | None) -> None:
        """Set the result of a job for its waiting callers, and cache it."""
        if not job.ended.done():
            job.ended.set_result(fault)
        self._cached_results[job.key] = fault
        if len(self._cached_results) > MAX_CACHED_RESULTS:
            self._cached_results.popitem(last=False)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineStopped("the server is shutting down")


def _key(constraint: StructuredOutputsParams) -> bytes:
    """Hash of all that a check depends on. The texts are not kept, as they can be long."""
    asked = (
        constraint.kind,
        constraint.text,
        constraint.disable_any_whitespace,
        constraint.disable_additional_properties,
    )
    return hashlib.sha256(repr((*asked, constraint.whitespace_pattern)).encode()).digest()
