"""Messages to each replica about the service that others gave to tenants: `fair` counts that of the whole fleet."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from quire.scheduler.queue.waiting_queue import MOST_REPORTED, MOST_SERVICE
from quire.supervisor.protocol import ServedElsewhere

SEND_SECONDS = 0.1  # between two messages to a replica
_MOST_UNSENT = 4096  # tenants whose service is kept for a replica, as many as its scheduler keeps


CallLater = Callable[[float, Callable[[], None]], asyncio.TimerHandle | None]


class Listener(Protocol):
    """A replica that hears of service elsewhere."""

    @property
    def is_serving(self) -> bool:
        """Whether an engine makes progress, so that messages to it do not pile up."""

    def send(self, command: ServedElsewhere) -> None:
        """Send a command."""


def _on_loop(seconds: float, action: Callable[[], None]) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(seconds, action)


class TenantService:
    """What is to be sent to each replica: weighted tokens by tenant. All methods must be called on one event loop.

    A replica that makes no progress gets its message later. A new engine gets nothing of the time before its start,
    because its own counters are empty, too.
    """

    def __init__(self, call_later: CallLater = _on_loop) -> None:
        """call_later: calls a function after some seconds; the default uses the running event loop."""
        self._call_later = call_later
        self._unsent: dict[Listener, dict[str, int]] = {}
        self._is_planned = False  # whether a call of `_send` comes
        self._timer: asyncio.TimerHandle | None = None

    def register(self, replica: Listener) -> None:
        """Add a replica."""
        self._unsent[replica] = {}

    def add(self, replica: Listener, service: Mapping[str, int]) -> None:
        """A replica has given service. All others hear of it after SEND_SECONDS."""
        if not service or len(self._unsent) == 1:
            return
        for other, unsent in self._unsent.items():
            if other is replica:
                continue
            for tenant, tokens in service.items():
                unsent[tenant] = min(unsent.pop(tenant, 0) + tokens, MOST_SERVICE)  # the latest last
            while len(unsent) > _MOST_UNSENT:
                del unsent[next(iter(unsent))]
        self._start_timer()

    def forget(self, replica: Listener) -> None:
        """A replica has another engine."""
        self._unsent[replica].clear()

    def close(self) -> None:
        """Send nothing more."""
        if self._timer is not None:
            self._timer.cancel()

    def _start_timer(self) -> None:
        if not self._is_planned:
            self._is_planned = True
            self._timer = self._call_later(SEND_SECONDS, self._send)

    def _send(self) -> None:
        self._is_planned = False
        for replica, unsent in self._unsent.items():
            if unsent and replica.is_serving:
                sent = dict(list(unsent.items())[:MOST_REPORTED])
                for tenant in sent:
                    del unsent[tenant]
                replica.send(ServedElsewhere(sent))
        if any(self._unsent.values()):  # of a replica that is stalled, until it makes progress
            self._start_timer()
