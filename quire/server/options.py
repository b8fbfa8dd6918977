"""The options of a server."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from quire.config import MOST_REPLICAS, Help, Routing, check_options
from quire.core.scheduling_params import MAX_NAME_LEN
from quire.errors import ConfigError, known_arguments_only
from quire.params import MAX_LOGPROBS
from quire.supervisor.restart_policy import RESTART_TIMEOUT

_ORIGIN = re.compile(r"https?://[^/?#\s@]+")  # in the form of the Origin header
Seconds = Annotated[float, Meta(ge=0, le=86_400)]
UnknownFields = Literal["refuse", "ignore"]


ADAPTER_CONFIG = "adapter_config.json"  # of PEFT, in the folder of each adapter


class LoraModule(NamedTuple):
    """An adapter that is read at the start. path: absolute."""

    name: str
    path: str


class _LoraModuleObject(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's JSON form of a LoraModule. base_model_name: has no effect, as there is one model."""

    name: str
    path: str
    base_model_name: str | None = None


@known_arguments_only(ConfigError)
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of the HTTP server: address, keys, TLS, observability. EngineOptions has those of the engine."""

    host: Annotated[str, Help("address to listen on; others than loopback need API keys", group="Server")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), Help("port to listen on; 0 takes a free one", group="Server")] = 8000
    served_model_name: Annotated[
        tuple[str, ...],
        Help(
            "model name in requests, or a pattern with *; may be repeated: all are accepted, the first is reported "
            "[default: the model's]",
            group="Server",
        ),
    ] = ()
    lora_modules: Annotated[
        tuple[str, ...],
        Help(
            'NAME=PATH of an adapter, or {"name": ..., "path": ...}; may be repeated; implies --enable-lora',
            "beta",
            group="LoRA adapters",
        ),
    ] = ()
    lora_dir: Annotated[
        str | None,
        Help(
            "folder of adapters, which requests name as NAME or OWNER/NAME below it; implies --enable-lora",
            "beta",
            group="LoRA adapters",
        ),
    ] = None
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
    verbose: Annotated[
        bool,
        Help(
            "print all lines of the start: kernels, weights, workspace, costs and others",
            "beta",
            group="Server",
            rare=True,
        ),
    ] = False
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
        Seconds, Help("seconds that accepted requests have to finish after SIGTERM", group="Server", rare=True)
    ] = 30.0
    data_parallel_size: Annotated[
        int,
        Meta(ge=1, le=MOST_REPLICAS),
        Help(
            "engine processes (replicas), each with the whole model and a part of the machine", "beta", group="Server"
        ),
    ] = 1
    routing: Annotated[
        Routing, Help("how a replica is chosen for a request, see docs/routing.md", "beta", group="Server", rare=True)
    ] = "predicted"
    tenant_shuffle_shard: Annotated[
        int | None, Help("replicas that each tenant uses [default: all]", "beta", group="Server", rare=True)
    ] = None
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
        shard, count = self.tenant_shuffle_shard, self.data_parallel_size
        if shard is not None and not 1 <= shard <= count:
            raise ConfigError(
                f"tenant_shuffle_shard: a tenant cannot use {shard} of {count} replicas; choose 1 to {count}, or "
                "change data_parallel_size"
            )
        for module in self.adapters:
            if module.name in self.served_model_name:
                raise ConfigError(f"lora_modules: {module.name!r} is a name of the served model, too; choose another")
        if self.lora_dir is not None and not Path(self.lora_dir).is_dir():
            raise ConfigError(f"lora_dir: {self.lora_dir} is not a folder; name one that has folders of adapters")
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origins: {origin!r} is not an origin; write scheme and host without a path, such as "
                    "https://chat.example:8443, or * for any"
                )

    @property
    def has_adapters(self) -> bool:
        """Whether the options name adapters, which implies enable_lora."""
        return bool(self.lora_modules) or self.lora_dir is not None

    @property
    def adapters(self) -> list[LoraModule]:
        """The adapters of lora_modules. Raises ConfigError for a wrong one, an equal name, and a missing folder."""
        modules = [_lora_module(text) for text in self.lora_modules]
        for place, module in enumerate(modules):
            if module.name in (other.name for other in modules[:place]):
                raise ConfigError(f"lora_modules: the name {module.name!r} is given twice")
            if not (Path(module.path) / ADAPTER_CONFIG).is_file():
                raise ConfigError(
                    f"lora_modules: there is no {ADAPTER_CONFIG} in {module.path}; name the folder of an adapter, as "
                    "PEFT writes it (adapters are not downloaded)"
                )
        return modules


def _lora_module(text: str) -> LoraModule:
    """An adapter as NAME=PATH or as vLLM's JSON. Raises ConfigError."""
    if text.lstrip().startswith("{"):
        try:
            read = msgspec.json.decode(text, type=_LoraModuleObject)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise ConfigError(f"lora_modules: {text!r:.200} is wrong: {error}") from error
        name, path = read.name, read.path
    else:
        name, _, path = text.partition("=")
    if not path or not (0 < len(name) <= MAX_NAME_LEN and name.isprintable() and name == name.strip()):
        raise ConfigError(
            f"lora_modules: {text!r:.300} must be NAME=PATH, with a name of 1 to {MAX_NAME_LEN} printable characters"
        )
    return LoraModule(name, str(Path(path).absolute()))
