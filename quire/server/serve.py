"""Serve: run the app on a socket until a signal comes. Knows sockets and what a person wants to read."""

import gc
import ipaddress
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from quire.config import EngineOptions
from quire.engine.build import build
from quire.errors import ConfigError
from quire.server.app import make_app
from quire.server.graceful import GracefulServer
from quire.server.keys import Keys, read_keys
from quire.server.service import Service

GRACE_SECONDS = 10  # for open streams, once a signal came
CALIBRATION_SECONDS = 1.0  # at most; a small model needs less
MAX_HEAD = 2**16  # bytes of a request before its body


def serve(
    options: EngineOptions,
    *,
    host: str,
    port: int,
    model_name: str | None,
    api_key_file: str | Path | None = None,
    report: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> None:
    """Load the model and serve it until SIGINT or SIGTERM; a second one does not wait for open streams.

    report(line) is told what is planned, and the URL once requests are accepted. Port 0 takes any free one.
    api_key_file: keys and their tenants, as `read_keys` takes them; None lets in anybody who can reach the host.
    Raises ConfigError for keys, a host or a port that cannot be used, before anything is loaded; and once more after
    it, should another server have begun to listen there meanwhile.
    """
    keys = None if api_key_file is None else read_keys(api_key_file)
    listener = _bind(host, port, keys)
    with listener:
        if keys is not None:
            report(f"keys       {keys}")
        built = build(_calibrated(options), report=report, progress=progress)
        service = Service(built, model_name)
        url = _url(listener)
        config = http_config(make_app(service, keys))
        _listen(listener, config.backlog)
        server = GracefulServer(
            config,
            ready=lambda: _announce(report, url, service.model_name, with_key=keys is not None),
            close=service.close,
            grace=GRACE_SECONDS,
        )
        gc.freeze()  # what is loaded stays: not to be searched for garbage while a large body is read
        server.run(sockets=[listener])


def _calibrated(options: EngineOptions) -> EngineOptions:
    """A server takes the time to learn its costs before requests come, unless it is told not to."""
    return options if options.calibration is not None else replace(options, calibration=CALIBRATION_SECONDS)


def http_config(app: ASGIApp) -> uvicorn.Config:
    """How HTTP is spoken. By h11, as uvicorn's faster parser takes in headers of any size, from anybody."""
    return uvicorn.Config(
        app,
        http="h11",
        h11_max_incomplete_event_size=MAX_HEAD,
        log_level="warning",
        access_log=False,
        lifespan="on",
    )


def _bind(host: str, port: int, keys: Keys | None) -> socket.socket:
    """A socket that does not listen yet, so that clients are refused until the model is ready."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(f"the host {host!r} with port {port} cannot be resolved: {error}") from error
    if keys is None and not ipaddress.ip_address(address[0]).is_loopback:
        raise ConfigError(
            f"{host} can be reached by other machines, which must have API keys; name them with --api-key-file "
            "(`quire key TENANT --file FILE` makes one), or serve on 127.0.0.1"
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


def _announce(report: Callable[[str], None], url: str, name: str, *, with_key: bool) -> None:
    key = "-H 'authorization: Bearer KEY' " if with_key else ""
    page = "" if with_key else f", documentation at {url}/docs"  # a browser has no key
    report(f"ready: {name} on {url} (OpenAI API at {url}/v1{page})")
    report(
        f"try: curl {url}/v1/chat/completions {key}-H 'content-type: application/json' "
        """-d '{"messages": [{"role": "user", "content": "Hello!"}]}'"""
    )
