"""The options of a server."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from quire.config import Help, check_options
from quire.core.scheduling_params import MAX_NAME_LEN
from quire.errors import ConfigError, known_arguments_only
from quire.params import MAX_LOGPROBS
from quire.supervisor.restart_policy import RESTART_TIMEOUT

_ORIGIN = re.compile(r"https?://[^/?#\s@]+")  # in the form of the Origin header
Seconds = Annotated[float, Meta(ge=0, le=86_400)]
UnknownFields = Literal["refuse", "ignore"]


@known_arguments_only(ConfigError)
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of the HTTP server: address, keys, TLS, observability. EngineOptions has those of the engine."""

    host: Annotated[str, Help("address to listen on; others than loopback need API keys", group="Server")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), Help("port to listen on; 0 takes a free one", group="Server")] = 8000
    served_model_name: Annotated[
        tuple[str, ...],
        Help(
            "model name in requests; may be repeated: all are accepted, the first is reported [default: the model's]",
            group="Server",
        ),
    ] = ()
    api_key_file: Annotated[str | None, Help("JSON file of API keys and their tenants", group="Keys and TLS")] = None
    api_key: Annotated[
        str | None,
        Help(
            "one API key, with the role admin, in place of a file", "beta", envvar="QUIRE_API_KEY", group="Keys and TLS"
        ),
    ] = field(default=None, repr=False)
    ssl_certfile: Annotated[
        str | None, Help("certificate chain (PEM); with it, the server accepts only HTTPS", group="Keys and TLS")
    ] = None
    ssl_keyfile: Annotated[
        str | None, Help("its private key (PEM) [default: in the file of the certificate]", group="Keys and TLS")
    ] = None
    cors_origins: Annotated[
        tuple[str, ...],
        Help("origin whose pages may send requests, such as https://chat.example; may be repeated", group="Server"),
    ] = ()
    unknown_fields: Annotated[
        UnknownFields,
        Help("what to do with a field of a body that the route does not have", "beta", group="Server", rare=True),
    ] = "refuse"
    disable_any_whitespace: Annotated[
        bool,
        Help(
            "JSON of structured outputs has no free white space, unless a request has a whitespace_pattern",
            "beta",
            group="Server",
            rare=True,
        ),
    ] = False
    store_path: Annotated[
        str | None,
        Help(
            "file of stored responses, files and batches (SQLite) [default: memory, until the end]",
            "beta",
            group="Server",
        ),
    ] = None
    root_path: Annotated[
        str,
        Meta(pattern=r"^((/[a-zA-Z0-9._~-]+)+)?\Z", max_length=256),
        Help(
            "path under which a reverse proxy offers the server, such as /llm [default: none]",
            "beta",
            group="Server",
            rare=True,
        ),
    ] = ""
    max_logprobs: Annotated[
        int,
        Meta(ge=0, le=MAX_LOGPROBS),
        Help("most likely tokens that a request may ask for with each token", "beta", group="Server", rare=True),
    ] = MAX_LOGPROBS
    enable_force_include_usage: Annotated[
        bool,
        Help(
            "vLLM's flag: each chunk of a stream of completions or chat has the usage so far",
            "beta",
            group="Server",
            rare=True,
        ),
    ] = False
    enable_auto_tool_choice: Annotated[
        bool,
        Help(
            "vLLM's flag, without effect: tool calls are always read in the format of the model",
            group="Server",
            rare=True,
        ),
    ] = False
    drain_timeout: Annotated[
        Seconds, Help("seconds that accepted requests have to finish after SIGTERM", group="Server")
    ] = 30.0
    watchdog: Annotated[
        Seconds, Help("seconds after which a stalled engine is restarted; 0: never", "beta", group="Server", rare=True)
    ] = 10.0
    engine_restart_timeout: Annotated[
        Seconds,
        Help(
            "seconds without an engine that serves, after which the server exits; 0: never",
            "beta",
            group="Server",
            rare=True,
        ),
    ] = RESTART_TIMEOUT
    metrics_prefix: Annotated[
        str,
        Meta(pattern=r"^[a-zA-Z_:][a-zA-Z0-9_:]{0,63}\Z"),
        Help("prefix of metric names", "beta", group="Observability", rare=True),
    ] = "quire:"
    access_log: Annotated[
        str | None, Help("file of JSON lines, one for each request; - is stdout", "beta", group="Observability")
    ] = None
    log_prompts: Annotated[
        bool, Help("write prompts into the access log, too", "beta", group="Observability", rare=True)
    ] = False
    otlp_endpoint: Annotated[
        str | None, Help("URL to send OpenTelemetry spans to (extra otel)", "beta", group="Observability")
    ] = None

    def check(self) -> None:
        """Raises ConfigError that names an option with a wrong type or value."""
        check_options(self)
        for name in self.served_model_name:
            if not (0 < len(name) <= MAX_NAME_LEN and name.isprintable()):
                raise ConfigError(
                    f"served_model_name: {name!r:.300} must have 1 to {MAX_NAME_LEN} printable characters"
                )
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origins: {origin!r} is not an origin; write scheme and host without a path, such as "
                    "https://chat.example:8443, or * for any"
                )
