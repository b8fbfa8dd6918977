"""Record: what is known of one HTTP request. Routes fill it in while they answer; sinks read it at the end."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from starlette.requests import Request
from starlette.types import Scope

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
