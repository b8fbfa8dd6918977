"""Rate-limit middleware.

It runs after authentication, which sets the caller, and before the body is read.
"""

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.api_keys import Caller
from quire.server.errors import response_to
from quire.server.middleware.quota import Quota, RateLimited

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def has_unsafe_method(scope: Scope) -> bool:
    """Whether a call is an HTTP request with a method other than GET, HEAD and OPTIONS."""
    return scope["type"] == "http" and scope["method"] not in _SAFE_METHODS


class RateLimit:
    """ASGI middleware that counts requests and adds the rate-limit headers to responses."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app, or answer 429."""
        caller: Caller | None = scope.get("state", {}).get("caller")
        if caller is None or not caller.quota.is_limited or not has_unsafe_method(scope):
            await self._app(scope, receive, send)
            return
        telling = with_quota_headers(caller.quota, send)
        try:
            caller.quota.count_request()
        except RateLimited as error:
            await response_to(error)(scope, receive, telling)
            return
        await self._app(scope, receive, telling)


def with_quota_headers(quota: Quota, send: Send) -> Send:
    """A `send` that adds the rate-limit headers to the response."""

    async def tell(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(quota.headers())
        await send(message)

    return tell
