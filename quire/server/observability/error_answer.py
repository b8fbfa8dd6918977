"""ErrorAnswer: an error as HTTP, which tells the request's record what it was."""

from collections.abc import Mapping

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.server.observability.request_record import find


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
