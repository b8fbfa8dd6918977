"""Authentication middleware: checks the API key of a request before any route and before its body is read."""

from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.api_keys import ANYBODY, Caller, Keys
from quire.server.errors import CrossSite, Forbidden, NotAllowed, OtherHost, Unauthenticated, response_to

OPEN = frozenset({"/live", "/ready"})  # for whoever starts and watches the process; they tell nothing about requests
_POLICY_VIOLATION = 1008  # of a WebSocket


class Gate:
    """ASGI middleware. keys: None lets in anybody, as the one tenant that there is."""

    def __init__(self, app: ASGIApp, keys: Keys | None) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on with its caller, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        caller = self._caller(Headers(scope=scope))
        if isinstance(caller, Caller) or scope["path"] in OPEN:
            scope.setdefault("state", {})["caller"] = caller if isinstance(caller, Caller) else None
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await response_to(caller)(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})

    def _caller(self, headers: Headers) -> Caller | NotAllowed:
        """Who it is, or what is to be said to nobody."""
        if self._keys is None:
            return ANYBODY if is_local(headers.get("host", "")) else OtherHost()
        scheme, _, key = headers.get("authorization", "").partition(" ")
        caller = self._keys.caller(key.strip().encode("latin-1")) if scheme.lower() == "bearer" else None
        return caller or Unauthenticated()


def is_local(host: str) -> bool:
    """Whether a Host header is an address, or this machine's name for itself; programs may leave it out.

    Without keys, whoever reaches the server is let in, and a page of another site can reach it under a name of its own
    that it has let lead here. To the browser both are then one site (DNS rebinding).
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name in ("", "localhost") or name.endswith(".localhost"):
            return True
        ip_address(name)
    except ValueError:
        return False
    return True


def caller_of(request: Request) -> Caller:
    """Who sent a request, as its key says. Raises Unauthenticated on an open path where no key came with it."""
    caller: Caller | None = request.state.caller
    if caller is None:
        raise Unauthenticated
    return caller


def operators_only(request: Request) -> None:
    """A dependency of routes. Raises Forbidden for a caller who does not run the server."""
    if not caller_of(request).is_admin:
        raise Forbidden


def own_pages_only(request: Request) -> None:
    """A dependency of routes that change something and need no body, which a page could let its visitors' browser ask.

    Raises CrossSite where a browser says that a page from elsewhere did. Programs say nothing of pages.
    """
    headers = request.headers
    site = headers.get("sec-fetch-site")
    page = headers.get("origin") or headers.get("referer")  # of browsers that do not say how far they are from here
    if site is None and page is not None:
        site = "same-origin" if urlsplit(page).netloc == headers.get("host") else "cross-site"
    if site not in (None, "none", "same-origin"):
        raise CrossSite
