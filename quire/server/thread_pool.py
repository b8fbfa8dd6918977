"""Thread pool for work that would block the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from quire.errors import EngineStopped
from quire.server.errors import Busy

T = TypeVar("T")

NUM_THREADS = 2
MAX_JOBS = 256  # running and waiting


class ThreadPool:
    """A few threads with a bounded queue."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_THREADS, "quire-pool")
        self._num_jobs = 0
        self._closed = False

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, run on a thread. Raises Busy beyond MAX_JOBS jobs, and EngineStopped after `close`."""
        self._check_open()
        if self._num_jobs >= MAX_JOBS:
            raise Busy
        self._num_jobs += 1
        job = [work]
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, self._unless_closed, job)
        finally:
            self._num_jobs -= 1
            job.clear()  # the pool keeps a cancelled job until its turn; this frees `work`

    def close(self) -> None:
        """Running jobs finish; waiting ones raise EngineStopped."""
        self._closed = True
        self._pool.shutdown(wait=False)

    def _unless_closed(self, job: list[Callable[[], T]]) -> T:
        self._check_open()
        return job.pop()()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineStopped("the server is shutting down")
