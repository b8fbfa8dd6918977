"""Adapters without matrices, and a loader of them without files. Every load is checked."""

from hashlib import sha256

from quire.core.adapter import Adapter


def new_adapter(name: str, num_bytes: int = 1, invocation_tokens: tuple[int, ...] = ()) -> Adapter:
    """An adapter whose content is its name."""
    digest = sha256(name.encode()).hexdigest()
    return Adapter(digest, name, f"/adapters/{name}", num_bytes, 8, invocation_tokens)


class ScriptedLoader:
    """Loads take `steps_of(adapter)` calls of `finished`. `errors`: by name, of loads that fail.

    in_use: digests of the adapters that running sequences or steps in flight use.
    """

    def __init__(self, max_loras: int, lora_bytes: int, in_use, *, steps_of=lambda adapter: 1, errors=()) -> None:
        self.memory: dict[str, Adapter] = {}
        self.loaded: list[str] = []  # names, in order
        self.faults: list[str] = []  # of loads that were started; the engine would take an assertion for a failed load
        self.is_closed = False
        self.steps_of = steps_of
        self.errors = dict(errors)
        self._max_loras = max_loras
        self._lora_bytes = lora_bytes
        self._in_use = in_use
        self._loading: dict[str, list] = {}  # by digest: the adapter, the calls that are left

    def start(self, load) -> None:
        adapter = load.adapter
        if self._in_use() & set(load.evicted) or not set(load.evicted) <= self.memory.keys():
            self.faults.append(f"{load}: an adapter that is in use, or is not there, is evicted")
        for digest in load.evicted:
            self.memory.pop(digest, None)
        if adapter.digest in self.memory or adapter.digest in self._loading:
            self.faults.append(f"{load}: it is there")
        self._loading[adapter.digest] = [adapter, self.steps_of(adapter)]
        present = [*self.memory.values(), *(one for one, _ in self._loading.values())]
        if len(present) > self._max_loras or sum(one.num_bytes for one in present) > self._lora_bytes:
            self.faults.append(f"{load}: there is no room")

    def end(self, adapter: Adapter) -> None:
        """End a load at once. `finished` does not report it."""
        del self._loading[adapter.digest]
        self.memory[adapter.digest] = adapter

    def finished(self):
        ended = []
        for digest, one in list(self._loading.items()):
            one[1] -= 1
            if one[1] <= 0:
                del self._loading[digest]
                error = self.errors.get(one[0].name, "")
                if not error:
                    self.memory[digest] = one[0]
                    self.loaded.append(one[0].name)
                ended.append((digest, error))
        return ended

    def wait(self, seconds: float) -> None:
        assert seconds > 0

    def close(self) -> None:
        self.is_closed = True
