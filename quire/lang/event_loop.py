"""An event loop on a thread of its own, which executes all calls of one backend."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, TypeVar

from quire.lang.errors import BackendClosed

T = TypeVar("T")


class LoopThread:
    """Runs until `close`. All methods but `spawn` may be called from any other thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="quire-lang", daemon=True)
        self._closed = False
        self._lock = threading.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread.start()

    def call_soon(self, function: Callable[..., object], *arguments: object) -> None:
        """Schedule a call on the loop, and do not wait for it. Raises BackendClosed."""
        with self._lock:
            self._check_open()
            self._loop.call_soon_threadsafe(function, *arguments)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task. To be called on the loop."""
        task = self._loop.create_task(work)
        self._track(task)  # the loop has only a weak reference
        return task

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return its result. Raises BackendClosed, and the coroutine's errors."""
        with self._lock:
            if self._closed:
                work.close()
            self._check_open()
            result: Future[T] = asyncio.run_coroutine_threadsafe(self._tracked(work), self._loop)
        try:
            return result.result()
        except CancelledError as error:
            raise BackendClosed("the backend was closed during this call") from error
        except BaseException:
            result.cancel()
            raise

    def close(self, cleanup: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel all tasks, run `cleanup`, and end the thread. Further calls have no effect."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            end = asyncio.run_coroutine_threadsafe(self._end(cleanup), self._loop)
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

    async def _tracked(self, work: Coroutine[Any, Any, T]) -> T:
        self._track(asyncio.current_task())
        return await work

    def _track(self, task: asyncio.Task[Any] | None) -> None:
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _end(self, cleanup: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await asyncio.gather(*self._cancel_tasks(), return_exceptions=True)
        await cleanup()
        await self._end_generators()
        with suppress(RuntimeError):  # at interpreter exit no thread can be started, which this needs
            await self._loop.shutdown_default_executor()

    def _cancel_tasks(self) -> list[asyncio.Task[Any]]:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        return tasks

    async def _end_generators(self) -> None:
        """Close the async generators that are not exhausted.

        asyncio closes each in a task of its own. A task that is cancelled before its first step would close nothing.
        """
        await self._loop.shutdown_asyncgens()
        await asyncio.sleep(0)
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            self._cancel_tasks()
            await asyncio.gather(*others, return_exceptions=True)
            await asyncio.sleep(0)
