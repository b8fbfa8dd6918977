"""Middleware that refuses the requests of a tenant without asking the engine, just after the engine has refused one.

The engine can refuse a request only when its body has been received, parsed and tokenized. In a flood this work would
delay the streams of other tenants.
"""

from collections.abc import Callable
from time import monotonic

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.errors import QueueFull
from quire.server.api_keys import Caller
from quire.server.errors import response_to

REMEMBERED_SECONDS = 0.1  # after a refusal by the engine
MAX_RETRIES = 512  # refused requests that are expected to return one after another; bounds Retry-After in a flood
QUEUED_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/generate"})


class _Refusal:
    """The last refusal of a tenant by the engine. latest: the time at which its last refused request should return."""

    __slots__ = ("error", "latest", "until")

    def __init__(self, error: QueueFull, now: float) -> None:
        self.error = error
        self.until = now + REMEMBERED_SECONDS
        self.latest = now + error.retry_after


class RecentRefusals:
    """The recent refusals of the engine, by tenant. clock: the time in seconds."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._refusals: dict[str, _Refusal] = {}

    def record(self, tenant: str, error: QueueFull) -> None:
        """Record a refusal by the engine."""
        if error.spacing is None:
            self._refusals.pop(tenant, None)
            return
        refusal, before = _Refusal(error, self._clock()), self._refusals.get(tenant)
        if before is not None:  # the engine does not know of the requests that were refused here
            refusal.latest = max(refusal.latest, before.latest)
        self._refusals[tenant] = refusal

    def next_error(self, tenant: str) -> QueueFull | None:
        """The error for another request of a tenant; None if the engine has to be asked.

        Each further request should return later, by the time in which one request leaves the queue.
        """
        refusal, now = self._refusals.get(tenant), self._clock()
        if refusal is None or refusal.error.spacing is None or now >= refusal.until:
            return None
        error, spacing = refusal.error, refusal.error.spacing
        refusal.latest = min(refusal.latest + spacing, now + error.retry_after + MAX_RETRIES * spacing)
        return QueueFull(error.reason, refusal.latest - now)


class QueueFullMiddleware:
    """ASGI middleware that answers 429 to requests of `QUEUED_PATHS`. It runs after authentication."""

    def __init__(self, app: ASGIApp, refusals: RecentRefusals) -> None:
        self._app = app
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app, or answer 429."""
        caller: Caller | None = scope.get("state", {}).get("caller")
        if caller is not None and scope["type"] == "http" and scope["path"] in QUEUED_PATHS:
            error = self._refusals.next_error(caller.tenant)
            if error is not None:
                await response_to(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
