"""Crash bisection and the denylist.

A request is a suspect after two crashes in steps that computed it, without progress in between. Suspects then run in
groups, one group after the other, while all other requests are held. If the engine crashes again, the suspects of that
step are split into smaller groups. A request that passes its position of the crash is cleared. A request is found
guilty after `ALONE` crashes in a row, without progress, in which it was alone in the step. Random kills of the process
meet this condition only if no engine lives for as long as one step.
"""

from collections.abc import Iterable, Mapping
from hashlib import sha256

from quire.core import codec
from quire.engine.inputs import NewRequest

ALONE = 3  # crashes
_TOGETHER = 2  # crashes that make a request a suspect
_PARTS = 8  # parts of a split: an innocent group costs one or two steps, a guilty one costs an engine start


class Suspects:
    """State of the crash bisection: from crashes and progress it derives which requests may run."""

    def __init__(self) -> None:
        self._marks: dict[str, int] = {}  # request id -> position that was being computed at the crash
        self._deaths: dict[str, int] = {}  # request id -> crashes without progress
        self._alone: dict[str, int] = {}  # request id -> crashes in which it was alone
        self._groups: list[list[str]] = []  # groups to try; the first one runs

    @property
    def watching(self) -> bool:
        """Whether `survived` would change anything."""
        return bool(self._marks)

    @property
    def trying(self) -> tuple[str, ...] | None:
        """Ids of the requests that may run during a bisection; None if all may run."""
        return tuple(self._groups[0]) if self._groups else None

    def died(self, rows: Mapping[str, int], num_gone: int = 0) -> str | None:
        """Record a crash. rows: requests of the uncommitted steps -> the last position that was to be computed.

        num_gone: number of other requests in these steps that have ended since, and may be the cause.
        Returns the id of the guilty request if it is certain, and forgets it; else None.
        """
        for name, position in rows.items():
            self._marks[name] = max(position, self._marks.get(name, 0))
            self._deaths[name] = self._deaths.get(name, 0) + 1
        tried = self._groups[0] if self._groups else []
        hit = [name for name in rows if self._deaths[name] >= _TOGETHER]
        if not hit:
            return None
        if len(rows) + num_gone == 1:
            (name,) = hit
            self._alone[name] = self._alone.get(name, 0) + 1
            if self._alone[name] >= ALONE:
                self.forget(name)
                return name
        spared = [name for name in tried if name not in rows]
        rest = [[name for name in group if name not in rows] for group in self._groups[1:]]
        self._groups = [group for group in (*_parts(hit), spared, *rest) if group]
        return None

    def survived(self, name: str, position: int) -> None:
        """Record that a step was committed which computed a request up to `position`. Clears it if that is progress."""
        if name in self._marks and position >= self._marks[name]:
            self.forget(name)

    def forget(self, name: str) -> None:
        """Remove a request that has ended or is cleared."""
        for notes in (self._marks, self._deaths, self._alone):
            notes.pop(name, None)
        remaining = ([one for one in group if one != name] for group in self._groups)
        self._groups = [group for group in remaining if group]


def _parts(names: Iterable[str]) -> list[list[str]]:
    names = list(names)
    size = -(-len(names) // _PARTS)
    return [names[i : i + size] for i in range(0, len(names), size)]


_REMEMBERED = 256  # entries of the denylist; the oldest are dropped


class GivenUp:
    """The denylist: content of requests that crashed the engine, compared without id, seed and delivered tokens."""

    def __init__(self) -> None:
        self._contents: dict[bytes, None] = {}

    def __contains__(self, request: NewRequest) -> bool:
        return bool(self._contents) and _content(request) in self._contents

    def add(self, request: NewRequest) -> None:
        """Add the content of a request."""
        self._contents[_content(request)] = None
        if len(self._contents) > _REMEMBERED:
            del self._contents[next(iter(self._contents))]


def _content(request: NewRequest) -> bytes:
    """SHA-256 of a request without its id, seed, known tokens and `resumed`."""
    asked = request._replace(request_id="", params=request.params.changed(seed=None), known=(), resumed=False)
    return sha256(codec.encode(asked)).digest()
