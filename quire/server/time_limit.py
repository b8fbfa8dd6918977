"""TimeLimit: the time that a client gives its whole request. Knows the event loop's clock, no formats.

It runs from when the body is read. An answer that is sent whole is refused with 408 when it is over, also if a part is
there: nobody can take a part for the whole. A stream has sent its status long ago, and gets an error as its
last event; what came before stays true. In both cases the engine forgets the request within a step.
`deadline` is something else: a request that cannot meet it is refused at once, and nothing is cut off.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from types import TracebackType
from typing import TypeVar

from quire.server.errors import TimedOut

T = TypeVar("T")


class TimeLimit:
    """An async context, to be entered as often as needed. Raises TimedOut when the time is over. None: no limit."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._end = None if seconds is None else asyncio.get_running_loop().time() + seconds
        self._timeout: asyncio.Timeout

    async def __aenter__(self) -> None:
        if self._end is not None and asyncio.get_running_loop().time() >= self._end:
            raise self._error()
        self._timeout = asyncio.timeout_at(self._end)
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError:
            raise self._error() from error

    async def of(self, work: Coroutine[object, object, T]) -> T:
        """What `work` returns."""
        try:
            async with self:
                return await work
        finally:
            work.close()  # where there was no time to begin

    async def each(self, items: AsyncIterator[T]) -> AsyncIterator[T]:
        """The items, as long as there is time. Time in which nobody asks for the next one counts, too."""
        if self._end is None:
            async for item in items:
                yield item
            return
        while True:
            try:
                async with self:
                    item = await anext(items)
            except StopAsyncIteration:
                return
            yield item

    def _error(self) -> TimedOut:
        return TimedOut(f"the request took longer than its timeout of {self._seconds:g} s; allow more, or ask for less")
