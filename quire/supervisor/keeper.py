"""Keeper: starts engines on a host and sees to their ends, beside an event loop. Knows no requests and no messages."""

import asyncio
import logging
from typing import Any

from quire.errors import QuireError
from quire.supervisor.launcher import Host

log = logging.getLogger(__name__)

STARTS = 5  # that may fail in a row
PAUSE = 0.25  # seconds behind the first of them; twice as long behind each of the others
_END_SECONDS = 5.0  # for an engine that is to end, or has hung up, until it is killed


class Keeper:
    """All methods belong to one event loop, and only `abandon` may be called while another one is at work."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._work: asyncio.Task[Any] | None = None  # what a thread of the host does, or did last
        self._is_left = False  # whether that is the start of an engine that nobody waits for any more

    async def launch(self) -> bool:
        """Start another engine, with several attempts; whether there is one."""
        for attempt in range(STARTS):
            try:
                self._work = asyncio.ensure_future(asyncio.to_thread(self._host.launch))
                self._work.add_done_callback(_look_at)  # also where nobody waits for it any more
                await asyncio.shield(self._work)
                return True
            except asyncio.CancelledError:
                self._is_left = True
                raise
            except (QuireError, OSError):  # also where the system has no memory for a process
                log.exception("the engine could not be started")
                await asyncio.sleep(PAUSE * 2**attempt)
        return False

    async def ended(self) -> str:
        """Wait for the end of the engine, which is killed if that takes long; how it ended."""
        self._work = waiting = asyncio.ensure_future(asyncio.to_thread(self._host.wait))
        await asyncio.wait({waiting}, timeout=_END_SECONDS)
        if not waiting.done():
            self._host.kill()
        return await asyncio.shield(waiting)

    async def abandon(self) -> None:
        """End an engine that is being started, or that is about to end: nobody wants it any more."""
        while self._work is not None and not self._work.done():  # a process may come only after the first signal
            self._host.kill()
            await asyncio.wait({self._work}, timeout=PAUSE)
        if self._work is not None and self._is_left and self._work.exception() is None:  # it was there before
            self._is_left = False
            self._host.connection.close()
            await self.ended()


def _look_at(work: "asyncio.Future[Any]") -> None:
    if not work.cancelled():
        work.exception()
