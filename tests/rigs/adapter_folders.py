"""Folders of adapters with little in them, an engine that pretends to read them, and a server with such an engine."""

import asyncio
import hashlib
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
from embedded_model_server import run_app, service_of, small_engine
from multi_tenant_server import Noting, Site

from quire.core.adapter import Adapter
from quire.errors import ModelError
from quire.server.api_keys import Keys, new_key
from quire.server.app import make_app
from quire.server.options import ADAPTER_CONFIG, ServerOptions

DEFAULTS = ServerOptions()
BROKEN = "broken"


def write_adapter(folder: Path, content: str = "") -> Path:
    """Write a folder that stands for an adapter. content: its digest depends on it; BROKEN: it cannot be read."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ADAPTER_CONFIG).write_text(content or folder.name, encoding="utf-8")
    return folder


def digest_of(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def read_pretended(name: str, path: str) -> Adapter:
    """The Adapter of such a folder. Raises ModelError."""
    content = (Path(path) / ADAPTER_CONFIG).read_text(encoding="utf-8")
    if content == BROKEN:
        raise ModelError(f"{path} holds no matrices")
    return Adapter(digest_of(content), name, path, num_bytes=len(content), rank=8)


class PretendedReader:
    """What a registry needs of Fleet. hold(): reads wait until `release`."""

    def __init__(self):
        self.read, self.pins = [], []
        self.open = asyncio.Event()
        self.open.set()

    async def read_adapter(self, name, path):
        self.read.append((name, path))
        await self.open.wait()
        return read_pretended(name, path)

    async def pin_adapter(self, adapter, *, pinned):
        self.pins.append((adapter.digest, pinned))


class AdapterNoting(Noting):
    """An engine that records the adapters of requests, and computes these without them."""

    def __init__(self, engine):
        super().__init__(engine)
        self.adapters = {}  # by request
        self.read, self.pins = [], []

    def add(self, request):
        self.adapters[request.id] = request.adapter
        super().add(msgspec.structs.replace(request, adapter=None))

    def read_adapter(self, name, path, done):
        self.read.append(name)
        future = Future()
        try:
            future.set_result(read_pretended(name, path))
        except ModelError as error:
            future.set_exception(error)
        done(future)

    def pin_adapter(self, adapter, *, pinned):
        self.pins.append((adapter.name, pinned))

    def last(self):
        """The names of the adapters of the latest request's prompts, in their order."""
        latest = list(self.adapters)[-1].rpartition("-")[0]
        return [one and one.name for id, one in self.adapters.items() if id.rpartition("-")[0] == latest]


@contextmanager
def run_adapter_site(
    folder: Path, keys: dict[str, dict[str, object]], options: ServerOptions = DEFAULTS, model: str | None = None
) -> Iterator[Site]:
    """Serve with the adapters below a folder. keys: arguments of `new_key` by a name of the key; {}: without keys."""
    built = small_engine(model, enable_lora=True)
    engine = AdapterNoting(built.engine)
    made = {name: new_key(**given) for name, given in keys.items()}
    modules = {"lora_modules": options.adapters, "lora_dir": str(folder)}
    service = service_of(replace(built, engine=engine), **modules)
    app = make_app(service, Keys([entry for _, entry in made.values()]) if made else None, options)
    with run_app(app) as url:
        yield Site(app, url, engine, {name: key for name, (key, _) in made.items()})
