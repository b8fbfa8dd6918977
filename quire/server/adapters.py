"""The names of LoRA adapters that a server knows: which adapter a name stands for, and which keys may use it.

The engine process reads the files, and knows adapters by their content. A request that has begun keeps its adapter,
whatever its name stands for later.
"""

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, Protocol
from weakref import WeakValueDictionary

from quire.core.adapter import Adapter
from quire.core.scheduling_params import MAX_NAME_LEN
from quire.errors import ConfigError, EngineStopped, ModelError, RequestError
from quire.server.api_keys import Caller
from quire.server.errors import AdapterPathNotAllowed, AdapterReadsBusy, UnknownAdapter
from quire.server.options import ADAPTER_CONFIG, LoraModule
from quire.server.thread_pool import ThreadPool

log = logging.getLogger(__name__)

MAX_ADAPTERS = 16_384  # names
MAX_READS = 16  # of adapters that one tenant is the first to name, at once
FAILURE_SECONDS = 5.0  # for which a name is not looked for again
MAX_FAILURES = 1024  # names
_MAX_PARTS = 2  # of a name in the folder: owner/name

Source = Literal["option", "request", "folder"]  # --lora-modules, a route, the folder at the first use


class AdapterEngine(Protocol):
    """What a registry asks of the engine. Fleet is one."""

    async def read_adapter(self, name: str, path: str) -> Adapter:
        """The adapter of a folder. Raises ModelError, RequestError, EngineStopped."""

    async def pin_adapter(self, adapter: Adapter, *, pinned: bool) -> None:
        """Keep an adapter in memory, or no longer. Raises RequestError, EngineStopped."""


class Entry(NamedTuple):
    """A name's adapter. number: vLLM's lora_int_id, from 1. pinned: whether it stays in memory."""

    number: int
    adapter: Adapter
    pinned: bool
    source: Source


class ServedModel(NamedTuple):
    """What a request's model name stands for. name: in the response. adapter: None for the model alone."""

    name: str
    adapter: Adapter | None = None


class Adapters:
    """The adapters of a server, by name.

    model_names: names that no adapter may have. modules: names that `start` reads. folder: where other names are looked
    for at their first use, and where the routes may read. is_enabled: whether the engine applies adapters.
    """

    def __init__(
        self,
        engine: AdapterEngine,
        thread_pool: ThreadPool,
        *,
        model_names: Collection[str] = (),
        modules: Sequence[LoraModule] = (),
        folder: Path | None = None,
        is_enabled: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._thread_pool = thread_pool
        self._model_names = model_names
        self._modules = modules
        self._folder = None if folder is None else folder.resolve()
        self.is_enabled = is_enabled
        self.failure: ConfigError | EngineStopped | None = None  # why the server must not serve
        self._clock = clock
        self._entries: OrderedDict[str, Entry] = OrderedDict()  # least recently used first
        self._num_entries = 0  # ever made
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by name
        self._first_reads: dict[str, asyncio.Task[Adapter | None]] = {}  # by name
        self._num_first_reads = Counter[str]()  # by tenant
        self._failures: OrderedDict[str, tuple[float, RequestError | None]] = OrderedDict()  # until, None: unknown

    async def start(self) -> None:
        """Read the adapters of --lora-modules. The first that cannot be used is the `failure`."""
        try:
            for module in self._modules:
                await self._start(module)
        except (ConfigError, EngineStopped) as error:
            self.failure = error

    async def _start(self, module: LoraModule) -> None:
        if module.name in self._model_names:
            raise ConfigError(f"lora_modules: {module.name!r} is a name of the served model, too; choose another")
        try:
            await self._read_and_register(module.name, module.path, source="option", pinned=False)
        except (ModelError, RequestError) as error:
            raise ConfigError(f"lora_modules: {module.name}={module.path} cannot be used: {error}") from error

    def listed(self, caller: Caller) -> Iterator[tuple[str, Entry]]:
        """The names that were read or used, and that the caller may use, in the order of their numbers."""
        allowed = (item for item in self._entries.items() if caller.may_use_adapter(item[0]))
        return iter(sorted(allowed, key=lambda item: item[1].number))

    async def resolve(self, name: str, caller: Caller) -> Adapter | None:
        """The adapter that a name stands for. None if there is none, or if the caller's key may not use it.

        A name of the folder is read at its first use; requests that come meanwhile share the read. Raises RequestError
        for an adapter that cannot be used, AdapterReadsBusy, Busy, EngineStopped.
        """
        if not self.is_enabled or not caller.may_use_adapter(name):
            return None
        entry = self._entries.get(name)
        if entry is not None:
            self._entries.move_to_end(name)
            return entry.adapter
        if self._folder is None or not _is_folder_name(name):
            return None
        reading = self._first_reads.get(name)
        if reading is None:
            until, error = self._failures.get(name, (0.0, None))
            if self._clock() < until:
                if error is None:
                    return None
                raise _copied(error)
            if self._num_first_reads[caller.tenant] >= MAX_READS:
                raise AdapterReadsBusy
            reading = asyncio.ensure_future(self._first_read(name, self._folder, caller.tenant))
            self._first_reads[name] = reading
            self._num_first_reads[caller.tenant] += 1
            reading.add_done_callback(partial(self._on_first_read, name, caller.tenant))
        return await asyncio.shield(reading)  # a request that leaves does not end the read of others

    async def load(self, name: str, path: str, *, in_place: bool = False, pinned: bool = False) -> None:
        """Let a name stand for the adapter at `path`, which is absolute or relative to the folder.

        in_place: also if the name stands for another one. Raises RequestError, AdapterPathNotAllowed, Busy,
        EngineStopped.
        """
        self._check_enabled()
        check_name(name)
        if name in self._model_names:
            raise RequestError(f"{name!r:.200} is a name of the served model; choose another", "lora_name")
        async with self._lock(name):
            found = await self._thread_pool.run("", partial(_path_below, self._folder, path))
            if name in self._entries and not in_place:
                raise RequestError(
                    f"The lora adapter {name!r:.200} has already been loaded; to replace it, set load_inplace to true",
                    "lora_name",
                )
            try:
                await self._read_and_register(name, found, source="request", pinned=pinned)
            except ModelError as error:
                raise RequestError(f"the adapter at {path!r:.200} cannot be used: {error}", "lora_path") from error
            self._failures.pop(name, None)

    async def unload(self, name: str | None, number: int | None = None) -> str:
        """Take a name away, and return it. Running requests keep the adapter. One in the folder is read again if used.

        number: that of the name, in its place or with it. Raises UnknownAdapter, RequestError, EngineStopped.
        """
        self._check_enabled()
        if name is None:
            if number is None:
                raise RequestError("either lora_name or lora_int_id is needed", "lora_name")
            name = next((one for one, entry in self._entries.items() if entry.number == number), None)
        if name is None or (number is not None and name in self._entries and self._entries[name].number != number):
            raise UnknownAdapter(name, number)
        async with self._lock(name):
            entry = self._entries.pop(name, None)
            if entry is None:
                raise UnknownAdapter(name, number)
            await self._unpin_if_last(entry)
        return name

    def _check_enabled(self) -> None:
        if not self.is_enabled:
            raise RequestError("this server was started without adapters; start it with --enable-lora", "lora_name")

    def _lock(self, name: str) -> asyncio.Lock:
        """The lock under which an entry changes. It exists while a task holds it or waits for it."""
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock

    async def _first_read(self, name: str, folder: Path, tenant: str) -> Adapter | None:
        """The adapter of a name in `folder`, which is registered; None if there is none. Remembers failures."""
        async with self._lock(name):
            if name in self._entries:  # loaded meanwhile
                return self._entries[name].adapter
            found = await self._thread_pool.run(tenant, partial(_path_of_name, folder, name))
            if found is None:
                self._remember_failure(name, None)
                return None
            try:
                return await self._read_and_register(name, found, source="folder", pinned=False)
            except (ModelError, RequestError) as error:
                log.error("the adapter %r cannot be used: %s", name, error)
                why = f"the adapter {name!r:.200} cannot be used; the server's log says why"
                failure = RequestError(why, "model")
                self._remember_failure(name, failure)
                raise _copied(failure) from error

    def _on_first_read(self, name: str, tenant: str, reading: "asyncio.Task[Adapter | None]") -> None:
        del self._first_reads[name]
        self._num_first_reads -= Counter({tenant: 1})  # without entries of 0
        if not reading.cancelled():
            reading.exception()  # the requests that waited for it may have left

    def _remember_failure(self, name: str, error: RequestError | None) -> None:
        self._failures[name] = self._clock() + FAILURE_SECONDS, error
        self._failures.move_to_end(name)
        if len(self._failures) > MAX_FAILURES:
            self._failures.popitem(last=False)

    async def _read_and_register(self, name: str, path: str, *, source: Source, pinned: bool) -> Adapter:
        """The caller has the lock of the name. Raises ModelError, RequestError, EngineStopped."""
        if name not in self._entries:
            self._make_room()
        adapter = await self._engine.read_adapter(name, path)
        before = self._entries.get(name)
        if pinned:
            await self._engine.pin_adapter(adapter, pinned=True)
        self._num_entries += 1
        number = self._num_entries if before is None else before.number
        self._entries[name] = Entry(number, adapter, pinned, source)
        self._entries.move_to_end(name)
        if before is not None:
            await self._unpin_if_last(before)
        return adapter

    async def _unpin_if_last(self, entry: Entry) -> None:
        """Unpin the adapter of an entry that was taken away, unless another name pins it."""
        digest = entry.adapter.digest
        if entry.pinned and not any(one.pinned and one.adapter.digest == digest for one in self._entries.values()):
            await self._engine.pin_adapter(entry.adapter, pinned=False)

    def _make_room(self) -> None:
        """Forget a name of the folder, which can be read again. Raises RequestError if all names were given."""
        if len(self._entries) < MAX_ADAPTERS:
            return
        oldest = next((name for name, entry in self._entries.items() if entry.source == "folder"), None)
        if oldest is None:
            raise RequestError(f"the server has {MAX_ADAPTERS:,} adapters; unload some first", "lora_name")
        del self._entries[oldest]


def check_name(name: str) -> None:
    """Raises RequestError for a name that no adapter may have."""
    if not (0 < len(name) <= MAX_NAME_LEN and name.isprintable() and name == name.strip()):
        raise RequestError(f"the name of an adapter must have 1 to {MAX_NAME_LEN} printable characters", "lora_name")


def _copied(error: RequestError) -> RequestError:
    """A new exception, because each raise adds to the traceback of one."""
    return RequestError(str(error), error.param)


def _is_folder_name(name: str) -> bool:
    """Whether a name may be that of a folder: NAME or OWNER/NAME, none of which is hidden or has path characters."""
    parts = name.split("/")
    return (
        0 < len(name) <= MAX_NAME_LEN
        and name.isprintable()
        and len(parts) <= _MAX_PARTS
        and not any(part.startswith(".") or not part.strip() or "\\" in part for part in parts)
    )


def _path_of_name(folder: Path, name: str) -> str | None:
    """The folder of an adapter below `folder`, links resolved; None if there is none there. Reads the disk."""
    try:
        path = (folder / name).resolve()
        return str(path) if path.is_relative_to(folder) and (path / ADAPTER_CONFIG).is_file() else None
    except (OSError, RuntimeError, ValueError):  # a name that is too long, or a loop of links
        return None


def _path_below(folder: Path | None, given: str) -> str:
    """The folder of an adapter that a route names, links resolved. Reads the disk.

    Raises AdapterPathNotAllowed for a path that is not below `folder`, RequestError for one without an adapter.
    """
    if folder is None:
        raise RequestError(
            "this server reads no adapters by request; start it with --lora-dir, below which they have to be",
            "lora_path",
        )
    try:
        path = (folder / given).resolve()
        if not path.is_relative_to(folder) or path == folder:
            raise AdapterPathNotAllowed
        is_there = (path / ADAPTER_CONFIG).is_file()
    except (OSError, RuntimeError, ValueError):
        is_there = False
    if not is_there:
        raise RequestError(f"there is no adapter at {given!r:.200}: no file {ADAPTER_CONFIG}", "lora_path")
    return str(path)
