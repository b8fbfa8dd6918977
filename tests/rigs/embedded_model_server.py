"""A small engine with the embedded model, and a server thread for an app."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import uvicorn

from quire.config import EngineOptions
from quire.fleet.fleet import Fleet
from quire.server.middleware.http_protocol import http_config
from quire.server.options import ServerOptions
from quire.server.service import Service
from quire.startup.build import Built, build
from quire.startup.model_info import model_info_of
from quire.supervisor.engine_handle import EngineThread

DEFAULTS = ServerOptions()
MODEL = "quire-demo"
STORY = "One Tuesday Mira went"
CHAT = [{"role": "user", "content": "Hello! Who are you?"}]
GREEDY = {"temperature": 0, "max_tokens": 20}


def small_engine(model: str | None = None, **changes) -> Built:
    given = {"max_num_seqs": 16, "memory": "256MiB", "max_model_len": 512, "dtype": "float32", **changes}
    options = EngineOptions(model=model, **given)
    return build(options, report=lambda line: None, progress=lambda done, total: None)


def service_of(built: Built, **options) -> Service:
    """A service whose engine runs on a thread of this process. options: of Service."""
    facts = model_info_of(built)
    host = EngineThread(built.engine, facts)
    host.launch()
    return Service(facts, built.tokenizer, Fleet(host), **options)


@contextlib.contextmanager
def run_app(app, options: ServerOptions = DEFAULTS, *, send_buffer: int | None = None) -> Iterator[str]:
    """Run an app with uvicorn on a thread, on a free loopback port. send_buffer: size of the socket buffer in bytes."""
    started = threading.Event()
    config = http_config(app, options)
    config.timeout_graceful_shutdown = 1
    server = uvicorn.Server(config)
    startup = server.startup

    async def startup_then_signal(sockets=None):
        await startup(sockets)
        started.set()

    server.startup = startup_then_signal
    with socket.socket() as listener:
        if send_buffer is not None:  # accepted connections inherit it
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        assert started.wait(60)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()
