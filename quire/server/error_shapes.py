"""Error objects of the routes of other dialects.

Every error has one status and one object, OpenAI's (errors.py). Here only the object is rewritten, by the path.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

ErrorObject = Mapping[str, object]  # OpenAI's: {"error": {"message", "type", "param", "code"}}

_ANTHROPIC_TYPES = {  # by status; any other is an invalid_request_error
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


_ANTHROPIC_DETAILS = {  # by field; clients that read them send the whole conversation instead
    "thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
}


def _anthropic(status: int, error: Mapping[str, object]) -> ErrorObject:
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error")
    details = _ANTHROPIC_DETAILS.get(str(error["param"]))
    return {"type": "error", "error": {**error, "type": kind, **({"details": details} if details else {})}}


def _ollama(_status: int, error: Mapping[str, object]) -> ErrorObject:
    return {"error": error["message"], "param": error["param"], "code": error["code"]}


_SHAPES: Mapping[str, Callable[[int, Mapping[str, object]], ErrorObject]] = MappingProxyType(  # by beginning of paths
    {"/v1/messages": _anthropic, "/api/": _ollama}
)


def in_shape_of_route(path: str, status: int, body: ErrorObject) -> ErrorObject:
    """An error object as clients of the route at `path` expect it."""
    error = body["error"]
    for beginning, shape in _SHAPES.items():
        if path.startswith(beginning) and isinstance(error, Mapping):
            return shape(status, error)
    return body
