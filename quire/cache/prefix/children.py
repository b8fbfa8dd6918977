"""Children: values sorted by key, in lists of bounded length, so that a change moves few of however many there are."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Generic, TypeVar

V = TypeVar("V")

MOST_IN_A_RUN = 512


class Children(Generic[V]):
    """A sorted map from bytes. A lookup is two bisections; a change moves at most MOST_IN_A_RUN entries."""

    __slots__ = ("_firsts", "_keys", "_values")

    def __init__(self) -> None:
        self._firsts: list[bytes] = [b""]  # the first key of each run
        self._keys: list[list[bytes]] = [[]]
        self._values: list[list[V]] = [[]]

    def __len__(self) -> int:
        return sum(map(len, self._keys))

    def __bool__(self) -> bool:
        return bool(self._keys[0])

    def __iter__(self) -> Iterator[V]:
        for values in self._values:
            yield from values

    def __reversed__(self) -> Iterator[V]:
        for values in reversed(self._values):
            yield from reversed(values)

    @property
    def keys(self) -> list[bytes]:
        """All of them, in order."""
        return [key for run in self._keys for key in run]

    @property
    def only(self) -> V | None:
        """The only value there is; None where there are none or more."""
        return self._values[0][0] if len(self._keys) == 1 and len(self._keys[0]) == 1 else None

    def get(self, key: bytes) -> V | None:
        """The value of a key."""
        run = max(0, bisect_right(self._firsts, key) - 1) if len(self._firsts) > 1 else 0
        keys = self._keys[run]
        i = bisect_left(keys, key)
        return self._values[run][i] if i < len(keys) and keys[i] == key else None

    def before(self, key: bytes) -> Iterator[V]:
        """Values whose keys come before `key`, nearest first."""
        run, i = self._place(key)
        yield from reversed(self._values[run][:i])
        for values in reversed(self._values[:run]):
            yield from reversed(values)

    def since(self, key: bytes) -> Iterator[V]:
        """Values whose keys are `key` or come behind it, in order."""
        run, i = self._place(key)
        yield from self._values[run][i:]
        for values in self._values[run + 1 :]:
            yield from values

    def add(self, key: bytes, value: V) -> None:
        """A new key."""
        run, i = self._place(key)
        keys, values = self._keys[run], self._values[run]
        keys.insert(i, key)
        values.insert(i, value)
        self._firsts[run] = keys[0]
        if len(keys) > MOST_IN_A_RUN:
            half = len(keys) // 2
            self._firsts.insert(run + 1, keys[half])
            self._keys.insert(run + 1, keys[half:])
            self._values.insert(run + 1, values[half:])
            del keys[half:], values[half:]

    def put(self, key: bytes, value: V) -> None:
        """Another value for a key that there is."""
        run, i = self._place(key)
        self._values[run][i] = value

    def remove(self, key: bytes) -> None:
        """A key that there is goes."""
        run, i = self._place(key)
        del self._keys[run][i], self._values[run][i]
        if self._keys[run]:
            self._firsts[run] = self._keys[run][0]
        elif len(self._keys) > 1:
            del self._firsts[run], self._keys[run], self._values[run]

    def _place(self, key: bytes) -> tuple[int, int]:
        """The run of a key, and its place there."""
        run = max(0, bisect_right(self._firsts, key) - 1) if len(self._firsts) > 1 else 0
        return run, bisect_left(self._keys[run], key)
