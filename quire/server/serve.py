"""Serve: run the app on a socket until a signal comes. Knows uvicorn, signals and what a person wants to read."""

import ipaddress
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from quire.config import EngineOptions
from quire.engine.build import build
from quire.errors import ConfigError
from quire.server.app import make_app

GRACE_SECONDS = 10  # for open streams, once a signal came


def serve(
    options: EngineOptions,
    *,
    host: str,
    port: int,
    model_name: str | None,
    report: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> None:
    """Load the model and serve it until SIGINT or SIGTERM; a second one does not wait for open streams.

    report(line) is told what is planned, and the URL once requests are accepted. Port 0 takes any free one.
    Raises ConfigError for a host or port that cannot be used, before anything is loaded.
    """
    listener = _bind(host, port)
    with listener:
        built = build(options, report=report, progress=progress)
        app = make_app(built, model_name=model_name)
        url = _url(listener)
        name = model_name or built.model_name
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_SECONDS, lifespan="on"
        )
        _run(_Server(config, lambda: _announce(report, url, name)), listener)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()


def _run(server: uvicorn.Server, listener: socket.socket) -> None:
    """uvicorn raises the signal that stopped it once more; here that is the end, not a failure."""
    before = {number: signal.signal(number, _ignore) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    pass


def _bind(host: str, port: int) -> socket.socket:
    """A socket that does not listen yet, so that clients are refused until the model is ready."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(f"the host {host!r} with port {port} cannot be resolved: {error}") from error
    if not ipaddress.ip_address(address[0]).is_loopback:
        raise ConfigError(
            f"{host} can be reached by other machines, and quire has no API keys yet; serve on 127.0.0.1 and put "
            "a proxy that authenticates in front of it"
        )
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"port {port} on {host} cannot be used ({error}); choose another with --port") from error
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _announce(report: Callable[[str], None], url: str, name: str) -> None:
    report(f"ready: {name} on {url} (OpenAI API at {url}/v1, documentation at {url}/docs)")
    report(
        f"try: curl {url}/v1/chat/completions -H 'content-type: application/json' "
        """-d '{"messages": [{"role": "user", "content": "Hello!"}]}'"""
    )
