"""Request bodies: their limits, their bytes per tenant, and their way to a validated model off the event loop.

A thread that parses holds the GIL for as long as one call into C takes. Therefore the number of JSON values is bounded
before the parser runs, and the number of messages before models are built.
"""

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import numpy as np
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from quire.errors import ContextLengthExceeded, DeadlineUnreachable, ModelError, QueueFull, RequestError
from quire.server.errors import BodyTimeout
from quire.server.held_answer import hold, in_pieces
from quire.server.middleware.auth import caller_of
from quire.server.middleware.quota import UNLIMITED, Quota
from quire.server.multipart import MultipartParser, Part
from quire.server.sse import ClientGone
from quire.server.thread_pool import ThreadPool
from quire.tenant_memory import LARGE, HeldBytes, TenantMemories, TenantMemory

T = TypeVar("T", bound=BaseModel)

MAX_BODY = 16 * 2**20  # bytes
MAX_UPLOAD = 128 * 2**20  # bytes of a form with a file, which is not kept in memory
BODY_SECONDS = 20.0  # for any body,
BYTES_PER_SECOND = 2**16  # and one second more for each so many bytes received
MAX_NESTING = 512  # levels of JSON; the limits of parsers differ between versions of Python
MAX_VALUES = 2**20 + 2**17  # commas outside of strings; MAX_PROMPT_TOKENS token ids fit
MAX_CONTAINERS = 2**17  # objects and lists,
MAX_FIELDS = 2**17  # and fields of objects: a parser takes much longer for them than for numbers
MANY = 256  # brackets of a body that is parsed on a thread, however short it is: models of messages take time

AT_ONCE = 4  # requests of a tenant that the event loop begins before it serves other connections

_CONVERSATIONS = ("messages", "input")  # fields that hold one as a list of objects
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_JSON_TYPE = re.compile(r"application/(json|[^;]*\+json)\s*(;|\Z)", re.IGNORECASE)
_PIECE = 2**16  # bytes that are scanned at once


class RequestBodies:
    """Reads the bodies of one app.

    max_messages: of one conversation; none with more fits into the context. check: called with each request, its
    validated body, and the names of its fields without effect.
    A body of more than LARGE bytes counts for its tenant until it is tokenized, and is always parsed on a thread.
    memories: what is held for each tenant.
    """

    def __init__(
        self, max_messages: int, check: Callable[[Request, Any, list[str]], None], memories: TenantMemories
    ) -> None:
        self._max_messages = max_messages
        self._check = check
        self._pool = ThreadPool(max_per_tenant=1)
        self._memories = memories
        self._turns: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(AT_ONCE))

    def route_class(self) -> type[APIRoute]:
        """A class of routes whose endpoint gets its argument `body` from here, and not from FastAPI's parser.

        FastAPI would parse and validate on the event loop. It still describes the routes in the OpenAPI document.
        """

        class BodyRoute(APIRoute):
            def get_route_handler(route) -> Callable[[Request], Coroutine[Any, Any, Response]]:
                return partial(self._handle, route.endpoint)

        return BodyRoute

    async def form(self, request: Request) -> AsyncGenerator[tuple[Part, bytes], None]:
        """The pieces of a multipart form, as they come. The first piece of each part is empty.

        The received bytes count for the tokens of the caller's key. Raises as `BodyReception.pieces`, and RequestError
        for a body that is no form.
        """
        caller = caller_of(request)
        parser = MultipartParser(request.headers.get("content-type", ""))
        with HeldBody(TenantMemory()) as held:
            reception = BodyReception(request, held, caller.quota, MAX_UPLOAD)
            try:
                async for piece in reception.pieces():
                    for content in parser.push(piece):
                        yield content
            finally:
                caller.quota.spend_bytes(reception.num_bytes)
        parser.finish()

    def close(self) -> None:
        """Close the thread pool. Can be called again."""
        self._pool.close()

    async def _handle(self, endpoint: Callable[..., Coroutine[Any, Any, Response]], request: Request) -> Response:
        """Call an endpoint with its body. A body that is refused counts for the tokens of the caller's key."""
        caller, types = caller_of(request), endpoint.__annotations__
        async with self._turns[caller.tenant]:
            await asyncio.sleep(0)
        memory = self._memories.of(caller.tenant)
        with HeldBody(memory) as held:
            request.state.body_bytes = held
            reception = BodyReception(request, held, caller.quota)
            try:
                data = await reception.read()
                held.is_large = len(data) > LARGE or _num_brackets(data) > MANY
                parse = partial(
                    _parsed, data, request.headers.get("content-type", ""), types["body"], self._max_messages
                )
                del data
                body, ignored = await self._pool.run(caller.tenant, parse) if held.is_large else parse()
                del parse
                self._check(request, body, ignored)
                response = await endpoint(body=body, **({"request": request} if "request" in types else {}))
                return in_pieces(response, memory)
            except Exception as error:
                if _is_charged(error):
                    caller.quota.spend_bytes(reception.num_bytes)
                raise


def release_body(request: Request) -> None:
    """The body of a request no longer counts for its tenant, although the request goes on."""
    request.state.body_bytes.release()


class HeldBody(HeldBytes):
    """The bytes of one body.

    is_large: whether work that grows with the body belongs on a thread; known once the body is received.
    """

    is_large = False


class BodyReception:
    """The reception of one body.

    held: its bytes. quota: of the caller's key. num_bytes: received so far.
    """

    def __init__(self, request: Request, held: HeldBody, quota: Quota = UNLIMITED, max_bytes: int = MAX_BODY) -> None:
        promised = request.headers.get("content-length", "")
        self._content_length = int(promised) if promised.isascii() and promised.isdigit() and len(promised) < 20 else 0
        self._receive = request.receive
        self._held = held
        self._quota = quota
        self._max_bytes = max_bytes
        self._clock = asyncio.get_running_loop().time
        self._started_at = self._clock()
        self._is_complete = False
        self.num_bytes = 0

    async def read(self) -> bytes:
        """The whole body.

        Raises as `pieces` and `hold`, and for a large body RateLimited if the key has no token left.
        """
        self._check()
        is_held = self._content_length > LARGE
        if is_held:
            await self._hold(self._content_length)
        pieces = []
        async for piece in self.pieces():
            pieces.append(piece)
            if self.num_bytes > LARGE and not is_held and not self._is_complete:  # the length is not known
                is_held = True
                await self._hold(MAX_BODY)
        return b"".join(pieces)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises HTTPException with 413, BodyTimeout after the time limit, ClientGone."""
        self._check()
        while not self._is_complete:
            message = await self._next(self._started_at + BODY_SECONDS + self.num_bytes / BYTES_PER_SECOND)
            piece = message.get("body", b"")
            self._is_complete = not message.get("more_body", False)
            self.num_bytes += len(piece)
            self._check()
            yield piece

    async def _hold(self, num_bytes: int) -> None:
        """Wait for the body's turn. The time does not count for its time limit."""
        self._quota.check_tokens()
        before = self._clock()
        await hold(self._held, num_bytes)
        self._started_at += self._clock() - before

    async def _next(self, end: float) -> Message:
        try:
            async with asyncio.timeout_at(end):
                message = await self._receive()
        except TimeoutError:
            raise BodyTimeout(BODY_SECONDS) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        return message

    def _check(self) -> None:
        if max(self._content_length, self.num_bytes) > self._max_bytes:
            raise HTTPException(
                413, f"the body is longer than {self._max_bytes} bytes; send less", {"connection": "close"}
            )


def _is_charged(error: Exception) -> bool:
    """Whether an error refuses the content of a body. A refusal for the load of the server or a quota does not."""
    if isinstance(error, HTTPException):
        return error.status_code in (400, 413) or isinstance(error, BodyTimeout)
    refused = isinstance(error, RequestError | RequestValidationError | ModelError | UnicodeEncodeError)
    return refused and not isinstance(error, QueueFull | DeadlineUnreachable)


def _num_brackets(data: bytes) -> int:
    """Number of opening brackets, also within strings."""
    return data.count(b"{") + data.count(b"[")


def _parsed(data: bytes, content_type: str, model: type[T], max_messages: int) -> tuple[T, list[str]]:
    """The model of a body, and the names of its fields without effect. A body that is not JSON counts as absent.

    Raises RequestValidationError for a body that is not JSON or not of the model, HTTPException with 400 for one that
    no parser should read, and ContextLengthExceeded for more than `max_messages` messages.
    """
    if not _JSON_TYPE.match(content_type):
        data = b""
    if _num_brackets(data) > MAX_NESTING or data.count(b",") >= MAX_VALUES or data.count(b":") > MAX_FIELDS:
        _check_structure(data)
    value = _json(data) if data else None
    body = value if isinstance(value, dict) else {}
    for name in _CONVERSATIONS:
        messages = body.get(name)
        if isinstance(messages, list) and len(messages) > max_messages and isinstance(messages[0], dict):
            raise ContextLengthExceeded(
                f"{name} has {len(messages):,} messages, more than the {max_messages:,} that can fit into the context "
                "(max_model_len), as each takes a token or more; send fewer messages",
                name,
            )
    try:
        ignored: list[str] = []
        return model.model_validate(value, context=ignored), ignored
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False, include_input=False)) from None


def _json(data: bytes) -> object:
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        problem = {"type": "json_invalid", "loc": ("body", error.pos), "msg": "", "ctx": {"error": error.msg}}
        raise RequestValidationError([problem]) from None
    except (ValueError, RecursionError) as error:
        raise HTTPException(400) from error


def _check_structure(data: bytes) -> None:
    """Raises HTTPException for too many levels, containers or values of JSON."""
    structure = Structure()
    for start in range(0, len(data), _PIECE):
        if structure.depth_after(data[start : start + _PIECE]) > MAX_NESTING:
            raise HTTPException(400, f"the body's JSON is nested more than {MAX_NESTING} levels deep; send it flatter")
        for what, number, most in (
            ("objects and lists", structure.num_containers, MAX_CONTAINERS),
            ("fields of objects", structure.num_colons, MAX_FIELDS),
            ("values", structure.num_commas + 1, MAX_VALUES),
        ):
            if number > most:
                raise HTTPException(
                    400, f"the body's JSON has more than {most:,} {what}; send several smaller requests"
                )


class Structure:
    """Counts of the brackets, colons and commas of a JSON text that comes in pieces."""

    def __init__(self) -> None:
        self.num_containers = 0
        self.num_colons = 0
        self.num_commas = 0
        self._depth = 0
        self._in_string = False
        self._escaping = False  # the last byte was a backslash that escapes the next one

    def depth_after(self, piece: bytes) -> int:
        """The greatest depth within the next piece. The time is linear in its length."""
        if self._escaping and piece:
            piece = b" " + piece[1:]
        plain = _ESCAPE.sub(b"  ", piece)
        self._escaping = plain.endswith(b"\\") if piece else self._escaping
        symbols = np.frombuffer(plain, np.uint8)
        quotes = np.cumsum(symbols == ord('"')) + self._in_string
        outside = quotes % 2 == 0
        opening = ((symbols == ord("[")) | (symbols == ord("{"))) & outside
        closing = ((symbols == ord("]")) | (symbols == ord("}"))) & outside
        depths = self._depth + np.cumsum(opening.astype(np.int64) - closing)
        self.num_containers += int(np.count_nonzero(opening))
        self.num_colons += int(np.count_nonzero((symbols == ord(":")) & outside))
        self.num_commas += int(np.count_nonzero((symbols == ord(",")) & outside))
        if len(symbols):
            self._in_string, self._depth = bool(quotes[-1] % 2), int(depths[-1])
        return int(depths.max(initial=self._depth))
