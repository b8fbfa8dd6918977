"""The viewers of a server: who is connected, and the events that each gets.

An update is asked of the engine when the client has taken the one before, so that nothing piles up for a client that
reads slowly.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from itertools import count

from quire.errors import QueueFull
from quire.monitor.update import Watcher
from quire.server.api_keys import Caller
from quire.server.errors import Rejection
from quire.server.service import Service
from quire.server.sse import json_event

MOST_VIEWERS = 16
MOST_PER_TENANT = 4
_FOR_ADMINS = 4  # of the viewers: tenants cannot keep admins out
_POLL_SECONDS = 0.5  # how often a viewer that waits for its next update asks whether the server ends


class TooManyViewers(Rejection):
    """No further viewer is admitted."""

    code = "too_many_viewers"

    def __init__(self, most: int, whose: str) -> None:
        super().__init__(
            429, f"{most} pages or programs{whose} look at this server already; close one, or try again later"
        )


class Viewers:
    """The connected viewers of a service. is_ending(): whether the server drains, so that viewers have to leave."""

    def __init__(self, service: Service, is_ending: Callable[[], bool]) -> None:
        self._service = service
        self._is_ending = is_ending
        self._numbers = count()
        self._num_by_tenant: Counter[str] = Counter()

    def admit(self, caller: Caller, replica: int = 0) -> "Viewing":
        """Admit a viewer of a replica, which must be closed. Raises TooManyViewers, and UnknownReplica."""
        self._service.engine.check_replica(replica)
        if self._num_by_tenant[caller.tenant] >= MOST_PER_TENANT:
            raise TooManyViewers(MOST_PER_TENANT, " with keys of this tenant")
        most = MOST_VIEWERS if caller.is_admin else MOST_VIEWERS - _FOR_ADMINS
        if self._num_by_tenant.total() >= most:
            raise TooManyViewers(most, "")
        self._num_by_tenant[caller.tenant] += 1
        return Viewing(self._service, next(self._numbers), watcher_of(caller), replica, self._is_ending, self._leave)

    def _leave(self, tenant: str) -> None:
        self._num_by_tenant[tenant] -= 1
        if not self._num_by_tenant[tenant]:
            del self._num_by_tenant[tenant]


class Viewing:
    """One viewer, from its admission until `close`."""

    def __init__(
        self,
        service: Service,
        number: int,
        watcher: Watcher,
        replica: int,
        is_ending: Callable[[], bool],
        leave: Callable[[str], None],
    ) -> None:
        self._service = service
        self._number = number
        self._watcher = watcher
        self._replica = replica
        self._is_ending = is_ending
        self._leave = leave
        self._num_seen = 0
        self._closed = False

    async def update(self) -> bytes:
        """The next update as a server-sent event. Raises EngineStopped."""
        engine = self._service.engine
        update = await engine.monitor_update(self._number, self._watcher, self._num_seen, self._replica)
        self._num_seen += 1
        return json_event(update)

    async def events(self, first: bytes, interval: float) -> AsyncIterator[bytes]:
        """The event `first` and the later ones, at most one every `interval` seconds. Raises EngineStopped."""
        loop, update = asyncio.get_running_loop(), first
        while True:
            due = loop.time() + interval
            yield update
            while (later := await self._update_at(due)) is None:
                if self._is_ending():
                    return
                due = loop.time() + max(interval, _POLL_SECONDS)
            update = later

    async def _update_at(self, due: float) -> bytes | None:
        """The update at a time of the loop; None if the server ends or the engine takes no calls now."""
        loop = asyncio.get_running_loop()
        while (rest := due - loop.time()) > 0 and not self._is_ending():
            await asyncio.sleep(min(rest, _POLL_SECONDS))
        if self._is_ending():
            return None
        try:
            return await self.update()
        except QueueFull:
            return None

    def close(self) -> None:
        """The viewer has left. Can be called again."""
        if not self._closed:
            self._closed = True
            self._leave(self._watcher.tenant)
            self._service.engine.forget_viewer(self._number, self._replica)


def watcher_of(caller: Caller) -> Watcher:
    """What a caller may see: admins everything, others what belongs to their tenant."""
    return Watcher(caller.tenant, caller.is_admin)
