"""Loads adapters on a thread, beside the steps of requests that use others."""

import logging
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

from quire.core.adapter import Adapter, AdapterLoad
from quire.errors import AdapterError
from quire.lora.loaded import LoadedAdapters
from quire.lora.peft import load_adapter, read_adapter
from quire.lora.tables import AdapterTables, PackedAdapters
from quire.models.description import ModelDescription

log = logging.getLogger(__name__)


class AdapterLoader:
    """See `quire.core.adapter.AdapterLoader`. All methods must be called from one thread."""

    def __init__(
        self, description: ModelDescription, dtype: str, tables: AdapterTables, *, memory: int | None = None
    ) -> None:
        """description, dtype: of the model whose products have the tables. memory: as in `read_adapter`."""
        self._description = description
        self._dtype = dtype
        self._tables = tables
        self._memory = memory
        self.loaded = LoadedAdapters(tables)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="quire-adapters")
        self._loading: dict[str, tuple[Adapter, Future[PackedAdapters]]] = {}  # by digest

    def read(self, name: str, path: str, when_done: Callable[[Future[Adapter]], None]) -> None:
        """Read and check the files of an adapter on the thread. when_done: called with the result, from any thread."""
        read = partial(read_adapter, Path(path), name, self._description, self._dtype, memory=self._memory)
        reading = self._pool.submit(read)
        reading.add_done_callback(when_done)

    def start(self, load: AdapterLoad) -> None:
        """Start to load an adapter, after those that leave memory have left it."""
        for digest in load.evicted:
            self.loaded.drop(digest)
        self._loading[load.adapter.digest] = load.adapter, self._pool.submit(self._load, load.adapter)

    def finished(self) -> list[tuple[str, str]]:
        """New results as (digest, error); the error is "" if the adapter is in memory."""
        results = []
        for digest, (adapter, loading) in list(self._loading.items()):
            if not loading.done():
                continue
            del self._loading[digest]
            error = loading.exception()
            if error is None:
                self.loaded.add(digest, loading.result())
                results.append((digest, ""))
                continue
            what = str(error) if isinstance(error, AdapterError) else f"{type(error).__name__}: {error}"
            if not isinstance(error, AdapterError):
                log.error("the adapter %r could not be loaded", adapter.name, exc_info=error)
            what = what.replace(adapter.path, adapter.name)  # clients get no paths of the server
            results.append((digest, f"the adapter {adapter.name!r:.80} could not be loaded: {what}"))
        return results

    def wait(self, seconds: float) -> None:
        """Block until a load ends, for at most `seconds`. Returns at once if none is in progress."""
        wait([loading for _, loading in self._loading.values()], seconds, FIRST_COMPLETED)

    def close(self) -> None:
        """Stop the thread after its current work."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _load(self, adapter: Adapter) -> PackedAdapters:
        return self._tables.pack(load_adapter(adapter, self._description, self._dtype))
