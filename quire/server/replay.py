"""The page over a replayed journal, on a loopback address: no model, no engine, no API keys."""

import ipaddress
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import uvicorn
from fastapi import APIRouter, FastAPI, Query, Request, Response

from quire.errors import ConfigError
from quire.monitor.recording import MOST_STEPS, Recording, record_file
from quire.server.api.native.monitor import NodeId
from quire.server.error_handlers import install_error_handlers
from quire.server.errors import UnknownObject
from quire.server.middleware.auth import AuthMiddleware
from quire.server.middleware.http_protocol import http_config
from quire.server.middleware.queue_full import RecentRefusals
from quire.server.options import ServerOptions
from quire.server.page import Mode, page_routes
from quire.server.serve import bind, listen, url_of

StepNumber = Annotated[int, Query(ge=0, le=MOST_STEPS, description="A step, counted from 0.")]
Count = Annotated[int, Query(ge=1, le=MOST_STEPS, description="Most steps; the answer may have fewer.")]


def replay_app(recording: Recording, name: str) -> FastAPI:
    """The app. name: of the journal, in place of a model's. Its pages have the routes of a server's page."""
    app = FastAPI(title="quire replay", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(AuthMiddleware, keys=None)
    install_error_handlers(app, RecentRefusals(), None)
    app.include_router(_step_routes(recording))
    app.include_router(page_routes(lambda _request: Mode("replay", keys=False, model=name)))
    return app


def _step_routes(recording: Recording) -> APIRouter:
    router = APIRouter()

    @router.get("/monitor/steps", response_model=None)
    def steps(first: StepNumber = 0, count: Count = 1) -> Response:
        """The updates after some steps. The first one of the answer is full."""
        try:
            body = recording.steps(first, count)
        except IndexError as error:
            raise _unknown_step(first, "first") from error
        return Response(body, media_type="application/json")

    @router.get("/monitor/nodes/{node}", response_model=None)
    def node(node: NodeId, _request: Request, step: StepNumber | None = None) -> Response:
        """A node after a step, after the last one without `step`. Its text is empty, because there is no tokenizer."""
        number = recording.num_steps - 1 if step is None else step
        try:
            detail = recording.node(number, node)
        except IndexError as error:
            raise _unknown_step(number, "step") from error
        if detail is None:
            raise UnknownObject("node", str(node), "node")
        answer = {**msgspec.structs.asdict(detail), "text": ""}
        return Response(msgspec.json.encode(answer), media_type="application/json")

    return router


def _unknown_step(number: int, param: str) -> UnknownObject:
    return UnknownObject("step", str(number), param)


def show_journal(
    file: Path, host: str, port: int, *, report: Callable[[str], None], advance: Callable[[float, float], None]
) -> None:
    """Replay a journal, and serve its page until SIGINT or SIGTERM.

    report(line) gets the URL, and why steps are missing if some are. advance(done, total): bytes of the journal that
    are read. Raises JournalError, OSError, and ConfigError for an address or port that cannot be used.
    """
    if not _is_loopback(host):
        raise ConfigError(f"the page of a journal has no API keys, and {host} is no loopback address; use 127.0.0.1")
    with bind(host, port, None) as listener:
        recording, why = record_file(file, advance)
        if not recording.num_steps:
            raise ConfigError(f"{file} has no steps to show{f': {why}' if why else ''}")
        if why:
            report(why)
        config = http_config(replay_app(recording, file.name), ServerOptions(host=host, port=port))
        listen(listener, config.backlog)
        report(f"{recording.num_steps:,} steps on {url_of(listener, secure=False)}")
        uvicorn.Server(config).run(sockets=[listener])


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
