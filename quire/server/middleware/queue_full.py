"""Middleware that refuses the requests of a tenant without asking the engine, just after the engine has refused one.

The engine can refuse a request only when its body has been received, parsed and tokenized. In a flood this work would
delay the streams of other tenants.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.errors import MAX_EXPECTED_RETRIES, QueueFull
from quire.server.api_keys import Caller
from quire.server.errors import response_to
from quire.server.middleware.rate_limit import has_unsafe_method, with_quota_headers

REMEMBERED_SECONDS = 0.1  # the longest time for which a refusal by the engine applies to other requests
QUEUED_PATHS = frozenset(
    {
        "/v1/chat/completions/batch",
        *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/v1/messages", "/generate"),
        *("/", "/generate_stream", "/completion"),
        *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings"),
        *("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/classify", "/v1/classify"),
    }
)


@dataclass(slots=True)
class _Refusal:
    """The last refusal of a tenant by the engine. Times are in seconds of the clock."""

    reason: str
    until: float  # until when it applies to other requests
    latest: float  # when the tenant's last refused request should return
    most: float  # the most value of `latest`
    spacing: float


class RecentRefusals:
    """The recent refusals of the engine, by tenant. clock: the time in seconds."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._refusals: dict[str, _Refusal] = {}

    def record(self, tenant: str, error: QueueFull) -> None:
        """Record a refusal by the engine."""
        before, now = self._refusals.pop(tenant, None), self._clock()
        if error.spacing is None:
            return
        latest = returns = now + error.retry_after
        if before is not None and now < before.until + REMEMBERED_SECONDS:
            latest = max(latest, before.latest)  # the engine does not know of the requests that were refused here
        until = now + min(REMEMBERED_SECONDS, error.retry_after)
        most = returns + MAX_EXPECTED_RETRIES * error.spacing
        self._refusals[tenant] = _Refusal(error.reason, until, latest, most, error.spacing)

    def next_error(self, tenant: str) -> QueueFull | None:
        """The error for another request of a tenant; None if the engine has to be asked.

        Each further request should return later, by the time in which one request leaves the queue.
        """
        refusal, now = self._refusals.get(tenant), self._clock()
        if refusal is None or now >= refusal.until:
            return None
        refusal.latest = min(refusal.latest + refusal.spacing, refusal.most)
        return QueueFull(refusal.reason, refusal.latest - now)


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
                if caller.quota.is_limited and has_unsafe_method(scope):
                    send = with_quota_headers(caller.quota, send)
                await response_to(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
