"""The page: its files from the package, with a content security policy that allows nothing but these files.

The routes need no API key, because a browser sends none with the first request. They tell nothing about requests.
"""

import gzip
import hashlib
import mimetypes
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec
from fastapi import APIRouter, Request, Response

from quire import __version__
from quire.server.errors import UnknownRoute

FILES = Path(__file__).parents[1] / "assets" / "page"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_TYPES = {".js": "text/javascript", ".mjs": "text/javascript", ".woff2": "font/woff2", ".svg": "image/svg+xml"}
_LEAST_GZIPPED = 1024  # bytes


class Mode(msgspec.Struct, frozen=True):
    """What the page has to know before it can ask for more. keys: whether the server asks for keys.

    Model and version are empty for a caller without a valid key. replicas: how many the caller can look at.
    """

    mode: Literal["live", "replay"]
    keys: bool
    model: str = ""
    version: str = __version__
    replicas: int = 1


class PageFile:
    """One file of the package."""

    def __init__(self, path: Path) -> None:
        self._content = path.read_bytes()
        kind = _TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        self._type = f"{kind}; charset=utf-8" if kind.startswith("text/") or kind == "image/svg+xml" else kind
        self._is_text = kind.startswith("text/") or kind in ("image/svg+xml", "application/json")
        self._tag = hashlib.sha256(self._content).hexdigest()[:32]

    @cached_property
    def _gzipped(self) -> bytes:
        return gzip.compress(self._content, mtime=0)

    def response(self, request: Request) -> Response:
        """The file, compressed if the client accepts that; 304 if the client has it."""
        accepted = request.headers.get("accept-encoding", "")
        is_gzipped = self._is_text and len(self._content) >= _LEAST_GZIPPED and _accepts_gzip(accepted)
        tag = f'"{self._tag}-gzip"' if is_gzipped else f'"{self._tag}"'
        headers = {**HEADERS, "etag": tag, "cache-control": "no-cache", "vary": "accept-encoding"}
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if is_gzipped:
            headers["content-encoding"] = "gzip"
        content = self._gzipped if is_gzipped else self._content
        return Response(content, headers={**headers, "content-type": self._type})


def _accepts_gzip(header: str) -> bool:
    for one in header.split(","):
        name, _, weight = one.partition(";")
        if name.strip().lower() in ("gzip", "*"):
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


def page_routes(mode: Callable[[Request], Mode], folder: Path = FILES) -> APIRouter:
    """The routes `/`, `/docs` and `/page/...`. mode: what a caller may know. folder: has the files."""
    router = APIRouter(include_in_schema=False)
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): PageFile(path) for path in found}

    def answer(name: str, request: Request) -> Response:
        file = files.get(name)
        if file is None:
            raise UnknownRoute(f"the page has no file {name!r:.200}; open / in a browser")
        return file.response(request)

    @router.head("/", response_model=None)
    @router.get("/", response_model=None)
    async def index(request: Request) -> Response:
        """The page."""
        return answer("index.html", request)

    @router.get("/docs", response_model=None)
    async def docs(request: Request) -> Response:
        """A page that shows `/openapi.json`."""
        return answer("docs.html", request)

    @router.get("/page/mode.json", response_model=None)
    async def tell_mode(request: Request) -> Response:
        """What the page has to know first."""
        body = msgspec.json.encode(mode(request))
        headers = {**HEADERS, "cache-control": "no-store"}
        return Response(body, media_type="application/json", headers=headers)

    @router.get("/page/{name:path}", response_model=None)
    async def file(name: str, request: Request) -> Response:
        """A file of the page."""
        return answer(name, request)

    return router
