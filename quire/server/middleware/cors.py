"""Cors: which pages of other sites may ask. Off unless origins are named; knows headers only.

It stands before the gate: a browser asks without a key whether it may ask, and is told this and nothing else.
Cookies play no part, so credentials are not allowed: a page has to have a key of its own.
"""

from collections.abc import Iterable

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

_TOLD = ("x-request-id", "retry-after")
_LIMITS = tuple(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens"))


class Cors(CORSMiddleware):
    """ASGI middleware. origins: as browsers write them, or "*" for any."""

    def __init__(self, app: ASGIApp, origins: Iterable[str]) -> None:
        super().__init__(
            app,
            allow_origins=tuple(origins),
            allow_methods=("GET", "POST"),
            allow_headers=("*",),  # clients add their own, such as x-stainless-lang of OpenAI's
            expose_headers=_TOLD + _LIMITS,
        )
