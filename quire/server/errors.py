"""Errors as HTTP: always OpenAI's error object, never internals. Knows status codes, no routes."""

import logging
from collections.abc import Sequence
from uuid import uuid4

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from quire.engine.async_engine import EngineStopped
from quire.errors import ModelError, RequestError

log = logging.getLogger(__name__)

_TYPES = {
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}


class UnknownModel(RequestError):
    """The request names a model that is not served here."""


class Busy(HTTPException):
    """More requests wait to be read than this server keeps."""

    def __init__(self) -> None:
        super().__init__(429, "too many requests wait to be read; try again in a second", {"retry-after": "1"})


class SequenceFailed(Exception):
    """The engine could not go on with a sequence."""


def error_object(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, object]:
    """The body of an error. Text that is not valid Unicode is made so."""
    clean = message.encode("utf-8", "replace").decode()
    kind = _TYPES.get(status, "invalid_request_error")
    return {"error": {"message": clean, "type": kind, "param": param, "code": code}}


def describe(error: Exception) -> tuple[int, dict[str, object]]:
    """The status and the body for any exception; an unexpected one is logged under the id that the client sees."""
    match error:
        case UnknownModel():
            return 404, error_object(404, str(error), "model", "model_not_found")
        case RequestError():
            return 400, error_object(400, str(error), error.param)
        case UnicodeEncodeError():  # from pydantic, where it would quote the text
            return 400, error_object(400, "the body holds text that is not valid Unicode (an unpaired surrogate)")
        case EngineStopped():
            return 503, error_object(503, str(error))
        case RequestValidationError():
            message, param = _first_problem(error.errors())
            return 400, error_object(400, message, param)
        case ModelError():  # such as a chat template that reaches for what is not its own; other requests go on
            log.error("%s", error)
            return 400, error_object(400, str(error))
        case HTTPException() if isinstance(error.__cause__, ValueError | RecursionError):  # FastAPI read the body
            return 400, error_object(400, _not_json(error.__cause__))
        case HTTPException():
            return error.status_code, error_object(error.status_code, str(error.detail))
    number = uuid4().hex
    log.error("error %s", number, exc_info=error)
    return 500, error_object(500, f"an unexpected error; the server's log describes it under {number}", code=number)


def install(app: FastAPI) -> None:
    """Let the app answer every exception with an error object."""

    async def answer(_request: Request, error: Exception) -> Response:
        status, body = describe(error)
        headers = error.headers if isinstance(error, HTTPException) else None
        return Response(msgspec.json.encode(body), status, headers, "application/json")

    known = (RequestError, ModelError, EngineStopped, SequenceFailed, RequestValidationError, UnicodeEncodeError)
    for kind in known:
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(HTTPException, answer)
    app.add_exception_handler(Exception, answer)


def _first_problem(problems: Sequence[dict[str, object]]) -> tuple[str, str | None]:
    """The first of pydantic's findings as a sentence, and the field it is about."""
    problem = problems[0]
    place = [str(part) for part in problem["loc"] if part != "body"]  # type: ignore[attr-defined]  # a tuple
    if problem["type"] == "json_invalid":
        context = problem["ctx"]
        return _not_json(f"{context['error']} at character {place[0]}"), None  # type: ignore[index]  # a dict
    if not place and problem["type"] in ("model_attributes_type", "dict_type", "missing", "model_type"):
        return "the body must be a JSON object, sent with content-type application/json", None
    param = ".".join(place) or None
    message = str(problem["msg"])
    context = problem.get("ctx")
    if isinstance(context, dict) and "name" in context:  # our own findings name their field
        inner = ".".join([*place, str(context["name"])])
        return (f"{message} in {param}" if param else message), inner
    return (f"{param}: {message}" if param else message), param


def _not_json(reason: object) -> str:
    return f"the body is not valid JSON: {reason}; send one whole JSON object as UTF-8 text, not compressed"
