"""LoopThread: an event loop on a thread of its own, on which one backend makes all its calls."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, TypeVar

from quire.lang.errors import BackendClosed

T = TypeVar("T")


class LoopThread:
    """Runs until it is closed. All methods may be called from any other thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="quire-lang", daemon=True)
        self._closed = False
        self._lock = threading.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread.start()

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call it on the loop, soon. Raises BackendClosed."""
        with self._lock:
            self._check_open()
            self._loop.call_soon_threadsafe(function, *arguments)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Let it run. To be called on the loop."""
        task = self._loop.create_task(work)
        self._keep(task)  # the loop itself does not
        return task

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What becomes of it on the loop. Raises BackendClosed, and what it raises."""
        with self._lock:
            if self._closed:
                work.close()
            self._check_open()
            result: Future[T] = asyncio.run_coroutine_threadsafe(self._kept(work), self._loop)
        try:
            return result.result()
        except CancelledError as error:
            raise BackendClosed("the backend was closed while it worked on this") from error
        except BaseException:
            result.cancel()
            raise

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """End all that runs, run `last`, and end the thread. May be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            end = asyncio.run_coroutine_threadsafe(self._end(last), self._loop)
        try:
            end.result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _check_open(self) -> None:
        if self._closed:
            raise BackendClosed("this backend is closed; make another one")

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _kept(self, work: Coroutine[Any, Any, T]) -> T:
        self._keep(asyncio.current_task())
        return await work

    def _keep(self, task: asyncio.Task[Any] | None) -> None:
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _end(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await asyncio.gather(*self._cancelled(), return_exceptions=True)
        await last()
        await self._end_generators()
        with suppress(RuntimeError):  # Python is ending, and begins no thread that could wait for the others
            await self._loop.shutdown_default_executor()

    def _cancelled(self) -> list[asyncio.Task[Any]]:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        return tasks

    async def _end_generators(self) -> None:
        """Close the generators that were left before their ends.

        asyncio closes each in a task of its own. A task that is cancelled before its first step closes nothing.
        """
        await self._loop.shutdown_asyncgens()
        await asyncio.sleep(0)
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            self._cancelled()
            await asyncio.gather(*others, return_exceptions=True)
            await asyncio.sleep(0)
