"""Thread pool for work that would block the event loop."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from quire.errors import EngineStopped
from quire.server.errors import Busy
from quire.tenant_queue import TenantQueue

T = TypeVar("T")

NUM_THREADS = 2  # that one tenant occupies at most; by default there is one more
MAX_JOBS = 256  # of one tenant, running and waiting


class _Job(NamedTuple):
    """work: empty once the coroutine that waited for the result has ended."""

    work: list[Callable[[], Any]]
    result: "Future[Any]"


class ThreadPool:
    """A few threads with a queue that is bounded for each tenant, and in which tenants take turns."""

    def __init__(self, max_per_tenant: int = NUM_THREADS, num_more: int = 1) -> None:
        """max_per_tenant: threads that one tenant occupies at most. num_more: threads beside those."""
        self._queue: TenantQueue[_Job] = TenantQueue(max_per_tenant)
        self._num_threads = max_per_tenant + num_more
        self._has_started = False
        self._num_jobs = Counter[str]()  # by tenant
        self._closed = False

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """The result of `work`, run on a thread.

        Raises Busy beyond MAX_JOBS jobs of the tenant, and EngineStopped after `close`.
        """
        self._check_open()
        if self._num_jobs[tenant] >= MAX_JOBS:
            raise Busy
        if not self._has_started:
            self._has_started = True
            for _ in range(self._num_threads):
                threading.Thread(target=self._serve, name="quire-pool", daemon=True).start()
        self._num_jobs[tenant] += 1
        job = _Job([work], Future())
        self._queue.put(tenant, job)
        try:
            result: T = await asyncio.wrap_future(job.result)
            return result
        finally:
            self._num_jobs[tenant] -= 1
            if not self._num_jobs[tenant]:
                del self._num_jobs[tenant]
            job.work.clear()  # the queue keeps a cancelled job until its turn; this frees `work`

    def close(self) -> None:
        """Running jobs finish; waiting ones raise EngineStopped."""
        self._closed = True
        for job in self._queue.close():
            if job.result.set_running_or_notify_cancel():
                job.result.set_exception(_stopped())

    def _serve(self) -> None:
        """The loop of a thread."""
        while (taken := self._queue.get()) is not None:
            tenant, job = taken
            del taken
            if job.result.set_running_or_notify_cancel():
                try:
                    job.result.set_result(job.work.pop()())
                except BaseException as error:
                    job.result.set_exception(error)
            del job  # so that the result is not kept until the next job
            self._queue.done(tenant)

    def _check_open(self) -> None:
        if self._closed:
            raise _stopped()


def _stopped() -> EngineStopped:
    return EngineStopped("the server is shutting down")
