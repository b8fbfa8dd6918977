"""Record: what is known of one HTTP request. Routes fill it in while they answer; sinks read it at the end."""

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import uuid4

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.params import SamplingParams

_STATE = "record"  # its name in ASGI's state
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})


class Told(NamedTuple):
    """What the model did for a request. Tokens are of all its prompts and sequences together; seconds of the first."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    finish_reasons: list[str]  # of each sequence
    params: SamplingParams | None = None  # of the first prompt
    queue_seconds: float | None = None
    first_token_seconds: float | None = None
    prompts: tuple[str | list[int], ...] = ()  # as texts, where they were given so; only where content is asked for
    outputs: tuple[str, ...] = ()  # the same


@dataclass(slots=True)
class Record:
    """One request, from its headers to the end of its answer. Times are of time.monotonic(), but for `at`.

    told(content) says what the model did; None where it did nothing. It is asked once, when the answer has ended.
    """

    given: str | None  # the id that the client chose
    own: str  # an id that nobody else has
    scope: Scope
    at: float  # seconds since 1970 when it came
    began: float
    answer_id: str | None = None  # the id that the answer and the engine's requests have
    model: str | None = None
    status: int = 0  # 0 where no answer was begun
    num_bytes: int = 0  # of the answer's body
    first_byte: float | None = None  # of the body
    ended: float = 0.0
    complete: bool = False  # whether the whole answer was handed over
    error: str | None = None  # its code
    operation: str = ""  # OpenTelemetry's name for what was asked of the model
    told: Callable[[bool], Told] | None = field(default=None, repr=False)

    @property
    def id(self) -> str:
        """What the client is told in the header x-request-id."""
        return self.given or self.answer_id or self.own

    @property
    def seconds(self) -> float:
        """From the headers to the end of the answer."""
        return self.ended - self.began

    @property
    def route(self) -> str | None:
        """The template of its path; None for a path that nothing answers to."""
        route = self.scope.get("route")
        return getattr(route, "path_format", None)

    @property
    def method(self) -> str:
        """HTTP's, or "other": clients may send any word, of any length, and labels have few values."""
        method = str(self.scope["method"])
        return method if method in _METHODS else "other"

    @property
    def tenant(self) -> str | None:
        """Whose key it came with; None for nobody's."""
        caller = self.scope["state"].get("caller")
        return None if caller is None else caller.tenant


def note(scope: Scope, record: Record) -> None:
    """From now on this is the scope's record."""
    scope.setdefault("state", {})[_STATE] = record


def find(scope: Scope) -> Record | None:
    """The record of a scope; None where nobody watches."""
    record: Record | None = scope.get("state", {}).get(_STATE)
    return record


def record_of(request: Request) -> Record:
    """The record of a request to the app."""
    record = find(request.scope)
    assert record is not None, "the app watches all requests"
    return record


HEADER = "x-request-id"
MAX_LENGTH = 128  # characters
MOST_KNOWN = 16384
_SAFE = re.compile(rf"[A-Za-z0-9._:/=+@-]{{1,{MAX_LENGTH}}}\Z")  # as ids of proxies, tracers and clients have
_SALT_LENGTH = 12
_OPERATIONS = {  # by kind of answer, as OpenTelemetry calls them
    "chatcmpl": "chat",
    "cmpl": "text_completion",
    "generate": "text_completion",
    "embd": "embeddings",
}


def accepted(given: str | None) -> str | None:
    """A client's id as it is; None for one that is too long, or could do harm in a log."""
    return given if given is not None and _SAFE.match(given) else None


def new_id() -> str:
    """32 hex digits, at random."""
    return uuid4().hex


class RequestIds:
    """Makes the ids of answers, and knows which of them belongs to the id that a client chose.

    The engine's requests must not share an id, whatever clients send: two that send the same one get different
    answers' ids. Of the same one the latest is known, by tenant: nobody's id is in another's way.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._answers: OrderedDict[tuple[str, str], str] = OrderedDict()  # by tenant and the id that was given

    def make(self, kind: str, request: Request) -> str:
        """The id of the answer to a request, such as cmpl-..., noted in its record."""
        record = record_of(request)
        record.model, record.operation = self._model_name, _OPERATIONS[kind]
        unique = record.own if record.given is None else f"{record.given}-{record.own[:_SALT_LENGTH]}"
        record.answer_id = f"{kind}-{unique}"
        if record.given is not None:
            key = (record.tenant or "", record.given)
            self._answers[key] = record.answer_id
            self._answers.move_to_end(key)
            if len(self._answers) > MOST_KNOWN:
                self._answers.popitem(last=False)
        return record.answer_id

    def answer_id(self, tenant: str, id: str) -> str:
        """The answer's id for one that this tenant chose; any other as it is."""
        return self._answers.get((tenant, id), id)


class ErrorAnswer(Response):
    """OpenAI's error object. body: as `error_object` makes it."""

    media_type = "application/json"

    def __init__(self, status: int, body: Mapping[str, object], headers: Mapping[str, str] | None) -> None:
        super().__init__(msgspec.json.encode(body), status, headers)
        self._object = body

    @property
    def param(self) -> str | None:
        """The field that is wrong; None where it is none."""
        error = self._object["error"]
        return error["param"] if isinstance(error, dict) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        note_error(scope, self._object)
        await super().__call__(scope, receive, send)


def note_error(scope: Scope, body: Mapping[str, object]) -> None:
    """Let the record of a request know the code in its error object, or its type where it has none."""
    record, error = find(scope), body["error"]
    if record is not None and isinstance(error, dict):
        record.error = error["code"] or error["type"]
