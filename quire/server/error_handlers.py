"""Exception handlers of the app."""

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from quire.engine.embeddings import EmbeddingFailed
from quire.errors import EngineStopped, ModelError, QueueFull, RequestError
from quire.server.errors import SequenceFailed, UnknownRoute, response_to
from quire.server.middleware.queue_full import RecentRefusals
from quire.server.middleware.quota import RateLimited
from quire.server.middleware.tarpit import Tarpit
from quire.server.route_hints import route_hint


def install_error_handlers(app: FastAPI, refusals: RecentRefusals, tarpit: Tarpit | None) -> None:
    """Make the app answer every exception with an error object.

    refusals: records the refusals of the engine. tarpit: None for no delays.
    """

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == 404:  # routes of this app raise NotFound
            path = request.url.path
            error = UnknownRoute(f"there is no route {path!r:.200}: {route_hint(path)}")
        response = response_to(error)
        _drop_tracebacks(error)
        if isinstance(error, QueueFull):
            refusals.record(request.state.caller.tenant, error)
        if tarpit is not None:
            await tarpit.delay(request, response.param)
        return response

    known = (RequestError, ModelError, EngineStopped, SequenceFailed, EmbeddingFailed, RequestValidationError)
    for kind in (*known, UnicodeEncodeError, RateLimited):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(HTTPException, answer)
    app.add_exception_handler(Exception, answer)


def _drop_tracebacks(error: BaseException | None) -> None:
    """Drop the tracebacks of an exception and its causes: their frames hold the body, and can refer to the exception.

    The frames are not cleared: several requests can have raised one exception, and some of them are still suspended.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__
