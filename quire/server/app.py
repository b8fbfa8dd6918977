"""The HTTP application: routes, limits and errors put together around one service."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Response
from starlette.requests import Request

from quire import __version__
from quire.server.body_limit import BodyLimit
from quire.server.chat import chat_routes
from quire.server.completions import completion_routes
from quire.server.embeddings import embedding_routes
from quire.server.errors import install
from quire.server.explain import explain_routes
from quire.server.gate import Gate
from quire.server.keys import Keys
from quire.server.operations import operation_routes
from quire.server.operators import operator_routes
from quire.server.service import Service
from quire.server.sglang import generate_routes
from quire.server.sse import ClientGone
from quire.server.tokens import token_routes

_CLIENT_GONE = 499  # nginx's number; nobody receives it


def make_app(service: Service, keys: Keys | None = None) -> FastAPI:
    """An app that starts `service` and closes it at its end. keys: None lets in anybody who can reach it."""

    @asynccontextmanager
    async def running(_app: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        try:
            yield
        finally:
            await service.close()

    app = FastAPI(title="quire", version=__version__, lifespan=running, redoc_url=None)
    app.add_middleware(BodyLimit)
    app.add_middleware(Gate, keys=keys)  # the last one is the outermost
    install(app)
    app.add_exception_handler(ClientGone, _nobody)
    for routes in (
        *(completion_routes, chat_routes, embedding_routes),
        *(token_routes, generate_routes, explain_routes, operation_routes, operator_routes),
    ):
        app.include_router(routes(service))
    return app


async def _nobody(_request: Request, _error: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)
