"""HTTP status and OpenAI error object of every exception. Messages contain no internals of the server."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil
from typing import ClassVar
from uuid import uuid4

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from quire.errors import (
    ContextLengthExceeded,
    DeadlineUnreachable,
    EngineStopped,
    ModelError,
    QueueFull,
    RequestError,
)
from quire.fleet.fleet import LastReplica, UnknownReplica
from quire.server.middleware.quota import RateLimited
from quire.server.observability.request_record import ErrorAnswer
from quire.tenant_memory import MAX_TENANT_BYTES

log = logging.getLogger(__name__)

MAX_MESSAGE = 4096  # characters of an error's message,
MAX_PARAM = 512  # and of the name of its field

_TYPES = {  # by status; any other is an invalid_request_error
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}
_CODES = {  # by type of a validation error, pydantic's or quire's
    "missing": "missing_required_parameter",
    "unknown_field": "unknown_parameter",
    "not_supported": "unsupported_parameter",
}

_WORD = re.compile(r"\w+")
_TYPE_NAME = re.compile(r"str|int|float|bool|.*\[.*")  # added to `loc` by pydantic for each member of a union


class NotFound(RequestError):
    """The request names something that does not exist. The status is 404."""

    code: ClassVar[str]


class UnknownModel(NotFound):
    """The request names a model that is not served."""

    code = "model_not_found"


class UnknownAdapter(NotFound):
    """An administrator unloads an adapter that is not loaded."""

    code = "adapter_not_found"

    def __init__(self, name: str | None, number: int | None = None) -> None:
        named = f"with the id {number}" if name is None else f"{name!r:.200}"
        super().__init__(f"The lora adapter {named} cannot be found; /lora-adapters lists those that are loaded")


class UnknownRequest(NotFound):
    """The request id is unknown, or belongs to another tenant. Both give the same answer."""

    code = "request_not_found"


class UnknownObject(NotFound):
    """The request names a stored object that does not exist, or belongs to another tenant. Both give one answer."""

    code = "not_found"

    def __init__(self, kind: str, id: str, param: str | None = None) -> None:
        super().__init__(f"there is no {kind} {id!r:.200}; it may have been deleted, or have expired", param)


class StoreFull(RequestError):
    """The stored objects of a tenant leave no room for another one."""

    def __init__(self, kind: str, number: int, num_bytes: int) -> None:
        super().__init__(
            f"there is no room to store this {kind}: a tenant may store {number:,} of them with {num_bytes:,} bytes in "
            "all, and the server's store is bounded, too; delete some, or wait until they expire"
        )


class UnknownRoute(NotFound):
    """The path is no route of this server."""

    code = "route_not_found"


class DeadlineMissed(HTTPException):
    """A request was aborted before its first output token because it could not meet its deadline any more."""

    def __init__(self, why: object) -> None:
        super().__init__(429, f"{why}; allow more time, or try again when the load is lower")


class Busy(HTTPException):
    """Too many jobs wait for the thread pool, or for a grammar check."""

    def __init__(self) -> None:
        super().__init__(429, "too many requests wait to be parsed; try again in a second", {"retry-after": "1"})


class Rejection(HTTPException):
    """A rejection with a `code` in its error object."""

    code: ClassVar[str]
    param: ClassVar[str | None] = None


class AdapterReadsBusy(Rejection):
    """A tenant names more new adapters at once than may be read for it."""

    code = "adapter_reads_busy"
    param = "model"

    def __init__(self) -> None:
        super().__init__(
            429, "other adapters are being read for this tenant; try again in a second", {"retry-after": "1"}
        )


class TenantMemoryFull(Rejection):
    """The bytes that the server holds for the tenant leave no room for those of a request, and it has waited."""

    code = "tenant_memory_full"

    def __init__(self, num_bytes: int) -> None:
        super().__init__(
            429,
            f"this request needs {num_bytes:,} bytes of the server's memory, and other requests of the tenant hold too "
            f"many of the {MAX_TENANT_BYTES:,} that a tenant can have (bodies, stored objects, answers that are not "
            "read yet); read the answers, or send fewer large requests at once. This bound has no setting",
            {"retry-after": "1"},
        )


class Draining(Rejection):
    """The server drains and accepts no new requests. The client should retry, with another instance."""

    code = "draining"

    def __init__(self) -> None:
        headers = {"retry-after": "1", "connection": "close"}
        super().__init__(503, "this server is shutting down and accepts no new requests; try again", headers)


class StoreUnavailable(Rejection):
    """The server cannot read or write its store."""

    code = "store_unavailable"

    def __init__(self) -> None:
        super().__init__(503, "the server cannot use its store at present; try again, or tell its operator")


class TimedOut(Rejection):
    """The request took longer than its `timeout`. The header x-should-retry keeps OpenAI's clients from retrying."""

    code = "request_timeout"
    param = "timeout"

    def __init__(self, message: str) -> None:
        super().__init__(408, message, {"x-should-retry": "false"})


class BodyTimeout(Rejection):
    """The body of a request was not received in time."""

    code = "request_timeout"

    def __init__(self, seconds: float) -> None:
        super().__init__(
            408, f"the body of the request did not arrive within {seconds:g} s; send it faster", {"connection": "close"}
        )


class NotAllowed(Rejection):
    """The caller is not authenticated or lacks the permission."""


class Unauthenticated(NotAllowed):
    """The request has no API key, or an unknown one."""

    code = "invalid_api_key"

    def __init__(self) -> None:
        message = (
            "this server requires a valid API key in the header `Authorization: Bearer KEY` (or `x-api-key: KEY`); ask "
            "its operator for one"
        )
        super().__init__(401, message, {"www-authenticate": "Bearer"})


class Forbidden(NotAllowed):
    """The key has not the role admin."""

    code = "insufficient_permissions"

    def __init__(self) -> None:
        super().__init__(403, "this route is for operators of the server; it needs a key with the role admin")


class AdapterPathNotAllowed(NotAllowed):
    """A path is not below the server's folder of adapters."""

    code = "path_not_allowed"
    param = "lora_path"

    def __init__(self) -> None:
        super().__init__(
            403, "lora_path leads out of the folder of --lora-dir; only adapters below it can be loaded by request"
        )


class CrossSite(NotAllowed):
    """A browser sent a state-changing request for a page of another site."""

    code = "cross_site_request"

    def __init__(self) -> None:
        super().__init__(403, "a page of another site may not send this request; use a program such as curl")


class HostNotAllowed(NotAllowed):
    """A server without keys got a Host header that is neither local nor an address."""

    code = "host_not_allowed"

    def __init__(self) -> None:
        super().__init__(
            403, "without API keys this server accepts only localhost or an IP address as host; use one of them"
        )


class SequenceFailed(Exception):
    """The engine ended a sequence with an error."""


def error_object(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, object]:
    """OpenAI's error object. Unpaired surrogates in the message are replaced.

    Text beyond MAX_MESSAGE characters, which a request's names of fields can cause, is left out.
    """
    clean = message[:MAX_MESSAGE].encode("utf-8", "replace").decode()
    kind = _TYPES.get(status, "invalid_request_error")
    return {"error": {"message": clean, "type": kind, "param": param and param[:MAX_PARAM], "code": code}}


def describe(error: Exception) -> tuple[int, dict[str, object]]:
    """Status and error object of an exception. An unexpected one is logged under a random id, which is the code."""
    match error:
        case Rejection():
            return error.status_code, error_object(error.status_code, error.detail, error.param, error.code)
        case RateLimited():
            return 429, error_object(429, str(error), None, "rate_limit_exceeded")
        case RequestError():
            status, code = _status_and_code(error)
            return status, error_object(status, str(error), error.param, code)
        case UnicodeEncodeError():  # from pydantic when it quotes the text
            return 400, error_object(400, "the body holds text that is not valid Unicode (an unpaired surrogate)")
        case EngineStopped():
            return 503, error_object(503, str(error))
        case RequestValidationError():
            return 400, error_object(400, *_validation_message(error.errors()))
        case ModelError():  # such as a chat template that the sandbox stops; other requests continue
            log.error("%s", error)
            return 400, error_object(400, str(error))
        case HTTPException() if isinstance(error.__cause__, ValueError | RecursionError):  # FastAPI's JSON parser
            return 400, error_object(400, _not_json(error.__cause__))
        case HTTPException():
            return error.status_code, error_object(error.status_code, str(error.detail))
    number = uuid4().hex
    log.error("error %s", number, exc_info=error)
    return 500, error_object(500, f"an unexpected error; the server's log describes it under {number}", code=number)


def _status_and_code(error: RequestError) -> tuple[int, str]:
    match error:
        case NotFound():
            return 404, error.code
        case UnknownReplica():
            return 404, "replica_not_found"
        case LastReplica():
            return 409, "last_replica"
        case ContextLengthExceeded():
            return 400, "context_length_exceeded"
        case DeadlineUnreachable():
            return 429, "deadline_unreachable"
        case QueueFull():
            return 429, "queue_full"
        case StoreFull():
            return 400, "store_full"
    return 400, "invalid_value"


def response_to(error: Exception) -> ErrorAnswer:
    """The response to an exception."""
    status, body = describe(error)
    return ErrorAnswer(status, body, _headers(error))


def _headers(error: Exception) -> Mapping[str, str] | None:
    match error:
        case HTTPException():
            return error.headers
        case DeadlineUnreachable():  # after this time the backlog is shorter by the excess if no request arrives
            return _retry_after(error.predicted - error.deadline)
        case RateLimited() | QueueFull():
            return _retry_after(error.retry_after)
    return None


def _retry_after(seconds: float) -> Mapping[str, str]:
    """The header in whole seconds, rounded up, at least 1."""
    return {"retry-after": str(max(1, ceil(seconds)))}


@contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Context manager that renames fields in RequestErrors. names: the engine's names -> those of the route.

    Renames `param` and names in the message: its first word, and every word with an underscore.
    """
    try:
        yield
    except (DeadlineUnreachable, QueueFull):  # these concern no field of the body
        raise
    except RequestError as error:
        message = _WORD.sub(
            lambda word: names.get(word[0], word[0]) if word.start() == 0 or "_" in word[0] else word[0], str(error)
        )
        param = error.param if error.param is None else names.get(error.param, error.param)
        raise type(error)(message, param) from error


def _validation_message(problems: Sequence[dict[str, object]]) -> tuple[str, str | None, str | None]:
    """Message, field and OpenAI's code of one of pydantic's errors: the first of those with the longest `loc`.

    For a union of text and list, the error inside the list says more than "not a text".
    """
    problem = max(problems, key=lambda problem: len(problem["loc"]))  # type: ignore[arg-type]  # a tuple
    kind = str(problem["type"])
    loc: Sequence[object] = problem["loc"]  # type: ignore[assignment]  # a tuple
    place = [str(part) for part in loc if part != "body" and not _TYPE_NAME.fullmatch(str(part))]
    if kind == "json_invalid":
        context = problem["ctx"]
        return _not_json(f"{context['error']} at character {place[0]}"), None, None  # type: ignore[index]  # a dict
    if not place and kind in ("model_attributes_type", "dict_type", "missing", "model_type"):
        return "the body must be a JSON object, sent with content-type application/json", None, None
    code = _CODES.get(kind, "invalid_type" if kind.endswith("_type") else "invalid_value")
    param = ".".join(place) or None
    message = str(problem["msg"])
    context = problem.get("ctx")
    if isinstance(context, dict) and "name" in context:  # quire's own validation errors name the field
        inner = ".".join([*place, str(context["name"])])
        return (f"{message} in {param}" if param else message), inner, code
    return (f"{param}: {message}" if param else message), param, code


def _not_json(reason: object) -> str:
    return f"the body is not valid JSON: {reason}; send one whole JSON object as UTF-8 text, not compressed"
