"""The record of one HTTP request, for access log, metrics and traces.

Routes and middleware fill it in. Sinks read it after the response has ended.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple
from uuid import uuid4

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.params import SamplingParams
from quire.server.error_shapes import in_shape_of_route

_STATE = "record"  # its key in the ASGI state
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})


class RequestStats(NamedTuple):
    """Generation figures of a request. Token counts are sums over all prompts and sequences; seconds: first prompt."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    finish_reasons: list[str]  # per sequence
    params: SamplingParams | None = None  # of the first prompt
    queue_seconds: float | None = None
    first_token_seconds: float | None = None
    prompts: tuple[str | list[int], ...] = ()  # as text or token ids; empty unless content is requested
    outputs: tuple[str, ...] = ()  # the same, as text


@dataclass(slots=True)
class RequestRecord:
    """One request, from its headers to the end of its response. Times are of time.monotonic(), except `arrival_time`.

    get_stats(content): returns the generation figures, with prompts and outputs if `content`. Sinks call it after the
    response has ended. None if nothing was generated or embedded.
    """

    client_id: str | None  # x-request-id of the client, if valid
    random_id: str  # a random unique id
    scope: Scope
    arrival_time: float  # time of arrival, seconds since 1970
    began: float
    answer_id: str | None = None  # id of the response body; the engine's ids are derived from it
    model: str | None = None  # that was used: the served model's name, or that of an adapter
    status: int = 0  # 0 if no response has begun
    num_bytes: int = 0  # of the response body
    first_byte: float | None = None  # time of the first byte of the body
    ended: float = 0.0
    complete: bool = False  # whether the whole response was sent
    error: str | None = None  # the code of the error object, or its type
    ignored: list[str] = field(default_factory=list)  # names of fields and tools that were accepted without effect
    operation: str = ""  # OpenTelemetry's name of the operation; empty for routes that run no model
    get_stats: Callable[[bool], RequestStats] | None = field(default=None, repr=False)

    @property
    def id(self) -> str:
        """The x-request-id of the response."""
        return self.client_id or self.answer_id or self.random_id

    @property
    def seconds(self) -> float:
        """Duration from the headers to the end of the response."""
        return self.ended - self.began

    @property
    def route(self) -> str | None:
        """The path template of the route; None if the request reached none."""
        route = self.scope.get("route")
        return getattr(route, "path_format", None)

    @property
    def method(self) -> str:
        """The HTTP method, or "other" for an unknown one, because metric labels must have few values."""
        method = str(self.scope["method"])
        return method if method in _METHODS else "other"

    @property
    def tenant(self) -> str | None:
        """The tenant of the API key; None without a valid key."""
        caller = self.scope["state"].get("caller")
        return None if caller is None else caller.tenant


def store_record(scope: Scope, record: RequestRecord) -> None:
    """Store the record in the scope."""
    scope.setdefault("state", {})[_STATE] = record


def remove_record(scope: Scope) -> None:
    """Remove the record from the scope. It refers to the scope, and only a garbage collection would free both."""
    del scope["state"][_STATE]


def find_record(scope: Scope) -> RequestRecord | None:
    """The record of a scope; None if the scope has none."""
    record: RequestRecord | None = scope.get("state", {}).get(_STATE)
    return record


def store_model(request: Request, name: str) -> None:
    """Store the name of the adapter that a request uses in its record, in place of the served model's."""
    record_of(request).model = name


def store_ignored(request: Request, names: Iterable[str]) -> None:
    """Add names of fields and tools without effect to the record of a request."""
    record = record_of(request)
    record.ignored = list(islice(dict.fromkeys((*record.ignored, *names)), MOST_IGNORED))


def record_of(request: Request) -> RequestRecord:
    """The record of a request. The middleware has stored it."""
    record = find_record(request.scope)
    assert record is not None, "ObservabilityMiddleware stores a record for every request"
    return record


REQUEST_ID_HEADER = "x-request-id"
IGNORED_HEADER = "x-quire-ignored"
MOST_IGNORED = 32  # names
MAX_CLIENT_ID_LENGTH = 128  # characters
MAX_CLIENT_IDS = 16384
_CLIENT_ID = re.compile(
    rf"[A-Za-z0-9._:/=+@-]{{1,{MAX_CLIENT_ID_LENGTH}}}\Z"
)  # characters of the ids of proxies, tracers and clients
_SUFFIX_LENGTH = 12
_OPERATIONS = {  # OpenTelemetry's operation names, by prefix of the response id
    "chatcmpl": "chat",
    "msg": "chat",
    "chat": "chat",
    "cmpl": "text_completion",
    "generate": "text_completion",
    "embd": "embeddings",
    "resp": "chat",
    "score": "embeddings",
    "rerank": "embeddings",
    "classify": "embeddings",
}
_STORED = "resp"  # such responses have ids without characters of the client


def valid_client_id(client_id: str | None) -> str | None:
    """The client's id unchanged; None if it is too long or has characters that are unsafe in a log."""
    return client_id if client_id is not None and _CLIENT_ID.match(client_id) else None


def new_id() -> str:
    """32 random hex digits."""
    return uuid4().hex


class RequestIds:
    """Generates response ids, and maps client ids to them.

    Ids of engine requests must be unique, so requests with the same client id get different response ids. A client id
    maps to the latest response of its tenant with it. At most MAX_CLIENT_IDS client ids are kept.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._answers: OrderedDict[tuple[str, str], str] = OrderedDict()  # by tenant and client id

    def make(self, kind: str, request: Request) -> str:
        """A new response id, such as cmpl-..., stored in the request's record."""
        record = record_of(request)
        record.operation = _OPERATIONS[kind]
        if record.model is None:  # else it is that of an adapter
            record.model = self._model_name
        if kind == _STORED:
            record.answer_id = f"{kind}_{record.random_id}"
        elif record.client_id is None:
            record.answer_id = f"{kind}-{record.random_id}"
        else:
            record.answer_id = f"{kind}-{record.client_id}-{record.random_id[:_SUFFIX_LENGTH]}"
        if record.client_id is not None:
            key = (record.tenant or "", record.client_id)
            self._answers[key] = record.answer_id
            self._answers.move_to_end(key)
            if len(self._answers) > MAX_CLIENT_IDS:
                self._answers.popitem(last=False)
        return record.answer_id

    def answer_id(self, tenant: str, id: str) -> str:
        """The response id for a client id of this tenant; any other id unchanged."""
        return self._answers.get((tenant, id), id)


class ErrorAnswer(Response):
    """An error response. body: from `error_object`; it is sent in the shape of the route."""

    media_type = "application/json"

    def __init__(self, status: int, body: Mapping[str, object], headers: Mapping[str, str] | None) -> None:
        super().__init__(msgspec.json.encode(body), status, headers)
        self._object = body

    @property
    def param(self) -> str | None:
        """The invalid field; None if the error concerns no field."""
        error = self._object["error"]
        return error["param"] if isinstance(error, dict) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, and store its code in the request's record."""
        record_error(scope, self._object)
        self.body = msgspec.json.encode(in_shape_of_route(scope["path"], self.status_code, self._object))
        self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def record_error(scope: Scope, body: Mapping[str, object]) -> None:
    """Store the code of an error object, or its type if it has none, in the request's record."""
    record, error = find_record(scope), body["error"]
    if record is not None and isinstance(error, dict):
        record.error = error["code"] or error["type"]
