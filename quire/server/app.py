"""The FastAPI application of a service."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Response
from starlette.requests import Request

from quire import __version__
from quire.server.api.anthropic.messages import message_routes
from quire.server.api.llama_cpp.routes import llama_cpp_routes
from quire.server.api.native.admin import admin_routes
from quire.server.api.native.explain import explain_routes
from quire.server.api.native.fleet import fleet_routes
from quire.server.api.native.health import health_routes
from quire.server.api.native.monitor import monitor_routes
from quire.server.api.native.programs import program_routes
from quire.server.api.native.tokenize import token_routes
from quire.server.api.ollama.chat import generation_routes
from quire.server.api.ollama.embed import embed_routes
from quire.server.api.ollama.models import model_routes
from quire.server.api.openai.batches import batch_routes
from quire.server.api.openai.chat import chat_routes
from quire.server.api.openai.completions import completion_routes
from quire.server.api.openai.embeddings import embedding_routes
from quire.server.api.openai.files import file_routes
from quire.server.api.openai.responses import response_routes
from quire.server.api.openai.responses_generation import Responses
from quire.server.api.sglang.routes import generate_routes
from quire.server.api.tgi.routes import tgi_routes
from quire.server.api.vllm.adapters import adapter_routes
from quire.server.api.vllm.classify import classify_routes
from quire.server.api.vllm.score import score_routes
from quire.server.api_keys import Keys
from quire.server.batch.background import Batches
from quire.server.error_handlers import install_error_handlers
from quire.server.middleware.auth import AuthMiddleware
from quire.server.middleware.cors import Cors
from quire.server.middleware.drain import Drain, DrainMiddleware
from quire.server.middleware.queue_full import QueueFullMiddleware, RecentRefusals
from quire.server.middleware.rate_limit import RateLimit
from quire.server.middleware.root_path import RootPathMiddleware
from quire.server.middleware.tarpit import Tarpit
from quire.server.observability.middleware import ObservabilityMiddleware, Observers
from quire.server.openapi import describe_api
from quire.server.options import ServerOptions
from quire.server.page import Mode, page_routes
from quire.server.service import Service
from quire.server.sse import ClientGone
from quire.server.store import Store
from quire.server.viewers import Viewers

DEFAULTS = ServerOptions()
_CLIENT_GONE = 499  # nginx's status; no client receives it


def make_app(
    service: Service,
    keys: Keys | None = None,
    options: ServerOptions = DEFAULTS,
    drain: Drain | None = None,
    store: Store | None = None,
    *,
    with_tarpit: bool = True,
) -> FastAPI:
    """An app that starts the engine of `service`, and closes `service` and `store` when it shuts down.

    keys: None admits every client. drain: set by the server on SIGTERM. store: None for one in memory. with_tarpit:
    whether the tarpit is on.
    """
    drain = Drain() if drain is None else drain
    store = Store() if store is None else store
    responses, batches = Responses(service, store, drain), Batches(service, store, drain, keys)
    observers, refusals = Observers(options, service.metrics), RecentRefusals()

    @asynccontextmanager
    async def running(_app: FastAPI) -> AsyncIterator[None]:
        await service.engine.start()
        await service.adapters.start()
        await responses.recover()
        await batches.start(app)
        try:
            yield
        finally:
            await service.close()
            await batches.close()
            await responses.close()
            store.close()
            await asyncio.to_thread(observers.close)

    app = FastAPI(title="quire", version=__version__, lifespan=running, docs_url=None, redoc_url=None)
    app.add_middleware(RateLimit)
    app.add_middleware(QueueFullMiddleware, refusals=refusals)
    app.add_middleware(DrainMiddleware, drain=drain)
    app.add_middleware(AuthMiddleware, keys=keys)
    if options.cors_origins:
        app.add_middleware(Cors, origins=options.cors_origins)
    app.add_middleware(ObservabilityMiddleware, sinks=observers.sinks)
    if options.root_path:
        app.add_middleware(RootPathMiddleware, root_path=options.root_path)  # the last one is the outermost
    install_error_handlers(app, refusals, Tarpit() if with_tarpit else None)
    app.add_exception_handler(ClientGone, _client_gone_response)
    for routes in (
        *(completion_routes, chat_routes, embedding_routes, score_routes, classify_routes),
        *(message_routes, generation_routes, embed_routes, model_routes),
        *(
            token_routes,
            generate_routes,
            tgi_routes,
            llama_cpp_routes,
            explain_routes,
            program_routes,
            adapter_routes,
            fleet_routes,
        ),
    ):
        app.include_router(routes(service))
    app.include_router(response_routes(service, responses))
    app.include_router(file_routes(service, store))
    app.include_router(batch_routes(service, store, batches))
    app.include_router(health_routes(service, drain))
    app.include_router(monitor_routes(service, Viewers(service, lambda: drain.begun)))
    known = Mode("live", keys is not None, service.model_name, replicas=service.engine.num_replicas)
    app.include_router(page_routes(lambda request: _mode(request, known)))
    app.include_router(admin_routes(service, options.metrics_prefix))
    describe_api(app, service, with_keys=keys is not None)
    return app


def _mode(request: Request, known: Mode) -> Mode:
    if request.state.caller is None:  # no valid key, or a host that is not allowed
        return Mode("live", known.keys, version="")
    return known


async def _client_gone_response(_request: Request, _error: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)
