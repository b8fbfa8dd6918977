"""CORS middleware: origins whose pages may send requests from a browser.

It runs before authentication, because browsers send preflight requests without a key. Credentials are not allowed, as
the server uses no cookies: a page needs an API key.
"""

from collections.abc import Iterable

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

_EXPOSED_HEADERS = ("x-request-id", "x-quire-ignored", "retry-after")
_RATE_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")
)


class Cors(CORSMiddleware):
    """ASGI middleware. origins: in the form of the Origin header, or "*" for any."""

    def __init__(self, app: ASGIApp, origins: Iterable[str]) -> None:
        super().__init__(
            app,
            allow_origins=tuple(origins),
            allow_methods=("GET", "POST"),
            allow_headers=("*",),  # clients send headers of their own, such as OpenAI's x-stainless-lang
            expose_headers=_EXPOSED_HEADERS + _RATE_LIMIT_HEADERS,
        )
