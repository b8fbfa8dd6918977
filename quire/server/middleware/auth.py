"""API key authentication, as middleware before any route and before the body is read."""

from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.api_keys import KEYLESS_CALLER, Caller, Keys
from quire.server.errors import CrossSite, Forbidden, HostNotAllowed, NotAllowed, Unauthenticated, response_to

OPEN_PATHS = frozenset({"/live", "/ready", "/", "/docs"})  # probes and the page, without data about requests
OPEN_FOLDER = "/page/"  # files of the page
_POLICY_VIOLATION = 1008  # WebSocket close code


class AuthMiddleware:
    """ASGI middleware. keys: None admits every client as ANYBODY whose Host header passes `is_local`."""

    def __init__(self, app: ASGIApp, keys: Keys | None) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Store the caller in the scope and call the app, or reject the call."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        # Only code of this process can set the state before, such as a batch for its requests.
        caller = state.get("caller") or self._caller(Headers(scope=scope))
        if isinstance(caller, Caller) or _is_open(scope):
            state["caller"] = caller if isinstance(caller, Caller) else None
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await response_to(caller)(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})

    def _caller(self, headers: Headers) -> Caller | NotAllowed:
        """The caller, or the error to answer with."""
        if self._keys is None:
            return KEYLESS_CALLER if is_local(headers.get("host", "")) else HostNotAllowed()
        return self._keys.caller(_key(headers).encode("latin-1")) or Unauthenticated()


def _is_open(scope: Scope) -> bool:
    """Whether a request needs no key: it reads an open path."""
    path = scope["path"]
    return (path in OPEN_PATHS or path.startswith(OPEN_FOLDER)) and scope.get("method") in ("GET", "HEAD")


def _key(headers: Headers) -> str:
    """The key of a request: of the header authorization, or without that header of x-api-key; empty without both."""
    given = headers.get("authorization")
    if given is None:
        return headers.get("x-api-key", "").strip()
    scheme, _, key = given.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def is_local(host: str) -> bool:
    """Whether a Host header is an IP address, localhost or empty (programs may omit it).

    A defense of servers without keys against DNS rebinding: another site can make a name of its own resolve to this
    server. A browser then treats both as one site, and lets pages of the other read answers.
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
    """The caller of a request. Raises Unauthenticated for a request to an open path without a valid key."""
    caller: Caller | None = request.state.caller
    if caller is None:
        raise Unauthenticated
    return caller


def admins_only(request: Request) -> None:
    """A dependency of routes. Raises Forbidden for a caller without the role admin."""
    if not caller_of(request).is_admin:
        raise Forbidden


def same_origin_only(request: Request) -> None:
    """A dependency of state-changing routes without a body, which a page of another site could make a browser request.

    Raises CrossSite if the headers name a page of another site. Clients other than browsers send no such headers.
    """
    headers = request.headers
    site = headers.get("sec-fetch-site")
    page = headers.get("origin") or headers.get("referer")  # from browsers without sec-fetch-site
    if site is None and page is not None:
        site = "same-origin" if urlsplit(page).netloc == headers.get("host") else "cross-site"
    if site not in (None, "none", "same-origin"):
        raise CrossSite
