"""Changes: lets threads and coroutines wait until something that another thread changes is as they want it."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType


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
