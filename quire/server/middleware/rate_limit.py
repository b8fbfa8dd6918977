"""RateLimit: a key's requests are counted, and every answer says what is left. Knows ASGI messages and quotas.

It stands behind the gate, which says whose the request is, and before any body is read.
"""

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.api_keys import Caller
from quire.server.errors import response_to
from quire.server.middleware.quota import Quota, RateLimited

_FREE = frozenset({"GET", "HEAD", "OPTIONS"})


def asks_for_work(scope: Scope) -> bool:
    """Whether a call wants something done, and not only to know something."""
    return scope["type"] == "http" and scope["method"] not in _FREE


class RateLimit:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on, or answer 429."""
        caller: Caller | None = scope.get("state", {}).get("caller")
        if caller is None or not caller.quota.is_limited or not asks_for_work(scope):
            await self._app(scope, receive, send)
            return
        telling = _telling(caller.quota, send)
        try:
            caller.quota.count_request()
        except RateLimited as error:
            await response_to(error)(scope, receive, telling)
            return
        await self._app(scope, receive, telling)


def _telling(quota: Quota, send: Send) -> Send:
    async def tell(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(quota.headers())
        await send(message)

    return tell
