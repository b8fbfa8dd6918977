"""Start of the HTTP server with its engine process."""

import ipaddress
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from secrets import token_bytes
from typing import BinaryIO

from msgspec import structs

from quire.config import DEFAULT_POLICY, EngineOptions, Policy, with_queue_limits
from quire.core.journal_file import open_journal
from quire.errors import ConfigError, EngineStopped
from quire.fleet.fleet import Fleet
from quire.hub import embedded
from quire.hub.locate import local_path
from quire.server.api_keys import Keys, read_keys, single_key
from quire.server.app import make_app
from quire.server.middleware.drain import Drain, GracefulServer
from quire.server.middleware.http_protocol import http_config, raise_descriptor_limit
from quire.server.observability.activity import ActivityLine
from quire.server.observability.middleware import check_observers
from quire.server.options import ServerOptions
from quire.server.service import Service
from quire.server.store import Store
from quire.startup.freed_memory import return_freed_memory
from quire.startup.replica_share import SECRET_BYTES, ReplicaShare
from quire.supervisor.engine_handle import EngineProcess
from quire.supervisor.gc_policy import GCPolicy
from quire.supervisor.spawn import Spawned, spawned_engine
from quire.tokenizer.load import open_tokenizer

CALIBRATION_SECONDS = 0.3  # maximum; the cost model also learns from the first requests


@contextmanager
def launched(
    options: EngineOptions,
    server: ServerOptions,
    *,
    spawned: Spawned | None = None,
    report: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> Iterator[Service]:
    """Context manager: a service whose engine process is ready. The process is killed on exit.

    server: its options of the engine process and of the service. spawned: as in EngineProcess. Raises ConfigError,
    ModelError, EngineStopped.
    """
    if server.has_adapters:
        options = replace(options, enable_lora=True)
    options = with_server_defaults(options)
    local = embedded.folder() if options.model is None else local_path(options.model, options.download_dir)
    pool = ThreadPoolExecutor(1)  # a local model's tokenizer is read while the engine loads the weights
    opening = None if local is None else pool.submit(open_tokenizer, local)
    pool.shutdown(wait=False)
    count = server.data_parallel_size
    with (
        _engines(options, count, spawned=spawned, report=report, progress=progress) as handles,
        _routing_journal(options, count) as journal,
    ):
        facts = handles[0].model_info
        path = Path(facts.path)
        tokenizer = opening.result() if opening is not None and path == local else open_tokenizer(path)
        return_freed_memory()  # of its files' content
        yield Service(
            facts,
            tokenizer,
            Fleet(
                *handles,
                watchdog=server.watchdog,
                restart_timeout=server.engine_restart_timeout,
                routing=server.routing,
                journal=journal,
                shard_size=server.tenant_shuffle_shard,
            ),
            server.served_model_name,
            unknown_fields=server.unknown_fields,
            always_reports_usage=server.enable_force_include_usage,
            max_logprobs=server.max_logprobs,
            disable_any_whitespace=server.disable_any_whitespace,
            lora_modules=server.adapters,
            lora_dir=server.lora_dir,
        )


def _routing_journal(options: EngineOptions, count: int) -> AbstractContextManager[BinaryIO | None]:
    """The journal of the router of several replicas, beside those of the engines. Raises ConfigError."""
    if options.journal is None or count == 1:
        return nullcontext()
    return open_journal(f"{options.journal}.routing")


@contextmanager
def _engines(
    options: EngineOptions,
    count: int,
    *,
    spawned: Spawned | None,
    report: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> Iterator[list[EngineProcess]]:
    """Context manager: the ready engine processes of `count` replicas. They are killed on exit.

    The first one measures the memory and the costs of steps for all, before the others use the machine. Raises
    ConfigError, ModelError, EngineStopped.
    """
    with ExitStack() as ends:

        def launch(handle: EngineProcess) -> EngineProcess:
            handle.launch()
            ends.callback(handle.wait)
            ends.callback(handle.kill)
            return handle

        first = EngineProcess(
            options,
            report=report,
            progress=progress,
            spawned=spawned,
            share=ReplicaShare(count=count, secret=token_bytes(SECRET_BYTES)),
        )
        handles = [launch(first)]
        if count > 1:
            pool = ends.enter_context(ThreadPoolExecutor(count - 1))  # it ends after the kills of what it waits for
            others = [
                EngineProcess(
                    options,
                    report=_ignore,
                    progress=_ignore,
                    share=structs.replace(first.share, index=index),
                    spawned=ends.enter_context(spawned_engine()),
                )
                for index in range(1, count)
            ]
            handles += pool.map(launch, others)
            report(f"replicas   {count} serve")
        yield handles


def _ignore(*_: object) -> None:
    """In place of the report and the progress of later replicas, which are those of the first."""


def with_server_defaults(options: EngineOptions) -> EngineOptions:
    """A copy with a server's defaults in place of None: calibration and queue limits."""
    if options.calibration is None:
        options = replace(options, calibration=CALIBRATION_SECONDS)
    return with_queue_limits(options)


def choose_keys(server: ServerOptions) -> Keys | None:
    """The keys of the key file, or the single key of the options; None without either. Raises ConfigError."""
    if server.api_key is None:
        return None if server.api_key_file is None else read_keys(server.api_key_file)
    if server.api_key_file is not None:
        raise ConfigError("api_key and api_key_file both name keys; give one (`quire key --file` adds to the file)")
    return single_key(server.api_key)


def choose_policy(options: EngineOptions, keys: Keys | None) -> tuple[Policy, str]:
    """The policy of a server, and why: the option, else `fair` if the keys name several tenants."""
    if options.policy is not None:
        return options.policy, "as the option says"
    num_tenants = 0 if keys is None else keys.num_tenants
    if num_tenants > 1:
        return "fair", f"the API keys name {num_tenants} tenants"
    return DEFAULT_POLICY, "the API keys name one tenant" if num_tenants else "no API keys tell tenants apart"


def check_certificate(certfile: str | None, keyfile: str | None) -> None:
    """Raises ConfigError for files that cannot be read, are encrypted or do not belong together."""
    if certfile is None:
        if keyfile is not None:
            raise ConfigError("ssl_keyfile needs ssl_certfile, the certificate that the key belongs to")
        return
    for option, path in (("ssl_certfile", certfile), ("ssl_keyfile", keyfile)):
        if path is not None:
            _check_readable(option, path)
    try:
        # without `password` OpenSSL would ask for one on the terminal
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password="")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"ssl_certfile {certfile} with ssl_keyfile {keyfile or certfile} cannot be used ({error}); they must be "
            "PEM files, belong together, and the key must not be encrypted"
        ) from error


def _check_readable(option: str, path: str) -> None:
    try:
        with Path(path).open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be read: {error.strerror}") from error


def serve(
    options: EngineOptions,
    server: ServerOptions,
    *,
    spawned: Spawned | None = None,
    report: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> None:
    """Load the model and serve it until SIGINT or SIGTERM, then drain. A second signal ends the drain.

    spawned: as in EngineProcess. report(line) gets the memory plan, and the URL when requests are accepted. Without
    keys the host must be a loopback address, and every client that can connect is admitted. Raises ConfigError
    before the model is loaded for unusable keys, certificates, store, host, port or folders of adapters, and
    afterwards for an unusable adapter, and if another server listens on the port since then. Raises EngineStopped when
    the engine ended and no other could be started.
    """
    server.check()
    check_certificate(server.ssl_certfile, server.ssl_keyfile)
    check_observers(server)
    raise_descriptor_limit()
    keys = choose_keys(server)
    store = Store(None if server.store_path is None else Path(server.store_path))
    listener = bind(server.host, server.port, keys)
    with listener:
        first = [] if keys is None else [f"keys       {keys}"]
        policy, reason = choose_policy(options, keys)
        first.append(f"policy     {policy}: {reason}")
        report = _after(first, report)
        options = replace(options, policy=policy)
        with launched(options, server, spawned=spawned, report=report, progress=progress) as service:
            url = url_of(listener, secure=server.ssl_certfile is not None)
            drain = Drain()
            config = http_config(make_app(service, keys, server, drain, store), server)
            listen(listener, config.backlog)
            gc_policy = GCPolicy()
            has_lines = server.access_log != "-"  # otherwise JSON lines have the terminal
            activity = ActivityLine(lambda: service.engine.health().stats, report if has_lines else lambda _line: None)

            def tick() -> None:
                gc_policy.collect_if_due(idle=not drain.num_open)
                activity.update()

            def announce() -> None:
                if _failure(service) is None:
                    _announce(report, url, service.model_name, with_key=keys is not None)

            http = GracefulServer(
                config,
                drain=drain,
                each_tick=tick,
                ready=announce,
                has_failed=lambda: _failure(service) is not None,
                close=service.close,
                drain_timeout=server.drain_timeout,
            )
            try:
                http.run(sockets=[listener])
            finally:
                gc_policy.close()
            failure = _failure(service)
            if failure is not None:
                raise failure


def _failure(service: Service) -> ConfigError | EngineStopped | None:
    """Why the server must not go on; None if it may."""
    return service.engine.failure or service.adapters.failure


def _after(first: Sequence[str], report: Callable[[str], None]) -> Callable[[str], None]:
    """A function that reports the first lines before its first line, so that an error at the start stands alone."""
    waiting = list(first)

    def run(line: str) -> None:
        while waiting:
            report(waiting.pop(0))
        report(line)

    return run


def bind(host: str, port: int, keys: Keys | None) -> socket.socket:
    """A bound socket that does not listen, so that connections are refused until the model is ready.

    Raises ConfigError for an unusable host or port, and without keys for an address other than loopback.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(f"the host {host!r} with port {port} cannot be resolved: {error}") from error
    if keys is None and not ipaddress.ip_address(address[0]).is_loopback:
        raise ConfigError(
            f"{host} can be reached by other machines, so that API keys are required; name them with --api-key-file "
            "(`quire key TENANT --file FILE` creates one), give one with --api-key, or serve on 127.0.0.1"
        )
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except (OSError, OverflowError) as error:
        listener.close()
        raise _port_error(host, port, error) from error
    return listener


def listen(listener: socket.socket, backlog: int) -> None:
    """Listen here and not in uvicorn, because not every event loop reports an error of it. Raises ConfigError.

    Two servers can bind the same port, as SO_REUSEADDR allows it while neither listens. The second listen fails.
    """
    try:
        listener.listen(backlog)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _port_error(host, port, error) from error


def _port_error(host: str, port: int, error: Exception) -> ConfigError:
    return ConfigError(f"port {port} on {host} cannot be used ({error}); choose another with --port")


def url_of(listener: socket.socket, *, secure: bool) -> str:
    """The URL of a server that listens there. secure: with TLS."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if secure else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _announce(report: Callable[[str], None], url: str, name: str, *, with_key: bool) -> None:
    key = "-H 'authorization: Bearer KEY' " if with_key else ""
    here = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")  # those are to listen on
    report(f"ready: {name} on {url} (page at {here}/, OpenAI API at {here}/v1, its routes at {here}/docs)")
    report(
        f"try: curl {here}/v1/chat/completions {key}-H 'content-type: application/json' "
        """-d '{"messages": [{"role": "user", "content": "Hello!"}]}'"""
    )
