"""Serve: run the app on a socket until a signal comes. Knows sockets and what a person wants to read."""

import gc
import ipaddress
import socket
from collections.abc import Callable

import uvicorn

from quire.config import EngineOptions
from quire.engine.build import build
from quire.errors import ConfigError
from quire.server.app import make_app
from quire.server.graceful import GracefulServer
from quire.server.service import Service

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
    Raises ConfigError for a host or port that cannot be used, before anything is loaded; and once more after
    it, should another server have begun to listen there meanwhile.
    """
    listener = _bind(host, port)
    with listener:
        built = build(options, report=report, progress=progress)
        service = Service(built, model_name)
        url = _url(listener)
        config = uvicorn.Config(make_app(service), log_level="warning", access_log=False, lifespan="on")
        _listen(listener, config.backlog)
        server = GracefulServer(
            config,
            ready=lambda: _announce(report, url, service.model_name),
            close=service.close,
            grace=GRACE_SECONDS,
        )
        gc.freeze()  # what is loaded stays: not to be searched for garbage while a large body is read
        server.run(sockets=[listener])


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
        raise _unusable(host, port, error) from error
    return listener


def _listen(listener: socket.socket, backlog: int) -> None:
    """Not left to uvicorn: what goes wrong here is not told by every event loop.

    Another server may have been bound to the same port meanwhile, which SO_REUSEADDR allows as long as none listens.
    """
    try:
        listener.listen(backlog)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _unusable(host, port, error) from error


def _unusable(host: str, port: int, error: Exception) -> ConfigError:
    return ConfigError(f"port {port} on {host} cannot be used ({error}); choose another with --port")


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _announce(report: Callable[[str], None], url: str, name: str) -> None:
    report(f"ready: {name} on {url} (OpenAI API at {url}/v1, documentation at {url}/docs)")
    report(
        f"try: curl {url}/v1/chat/completions -H 'content-type: application/json' "
        """-d '{"messages": [{"role": "user", "content": "Hello!"}]}'"""
    )
